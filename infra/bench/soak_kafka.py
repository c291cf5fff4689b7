"""The soak of Kafka: messages are written while the gateway that runs them is killed again and again.

Each message has an answer in the end. The first answers of a key come in the order of its messages. The cluster is librdkafka's mock.

    python infra/bench/soak_kafka.py --kills 100
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
from kafka_cluster import Cluster, cluster
from killable_gateway import KillableGateway
from report import Report, parser

KEYS = 20
WRITES_PER_S = 25
PAUSE_S = 17.0
"""The longest pause between two kills. The group waits 10 s for a dead member."""
QUIET_S = 180.0
LEFT_S = 10.0
TOPIC, ANSWERS = "orders", "answers"
HANDLER = """
import time

def handler(event):
    time.sleep(0.005)
    return event
"""


class Soak:
    """One run of the soak, within `root`."""

    def __init__(self, root: Path, seed: int, kafka: Cluster) -> None:
        self._mark = secrets.token_hex(3)
        self._root, self._kafka = root, kafka
        self._chance = random.Random(seed)
        self._gateway = KillableGateway(root, self._mark)
        self.written: Counter[int] = Counter()
        """The number of messages of each key."""

    async def run(self, kills: int, report: Report) -> None:
        await self._gateway.start()
        try:
            await self._deploy()
            over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(over))
                for _ in range(kills):
                    await asyncio.sleep(self._chance.uniform(0.0, PAUSE_S))
                    await self._gateway.kill()
                    await self._gateway.start()
                over.set()
            answers = await asyncio.to_thread(self._answers)
            code = await self._gateway.stop()
        finally:
            await self._gateway.kill()
            left = await asyncio.to_thread(self._gateway.left, LEFT_S)
        self._check(answers, report)
        report.add("exit_code", code, "", "== 0")
        report.add("left_processes", len(left), f"{left[:20]}", "<= 0")
        report.add("kills", kills)

    async def _deploy(self) -> None:
        folder = self._root / "code"
        folder.mkdir()
        (folder / "handler.py").write_text(HANDLER)
        source = {
            "type": "kafka", "brokers": self._kafka.brokers, "topic": TOPIC, "group": "soak", "result": ANSWERS,
        }  # fmt: skip
        overrides = {"name": f"kafka-{self._mark}", "source": [source], "scale.max": 2, "idempotent": True}
        async with aiohttp.ClientSession(self._gateway.url) as session:
            order = {"path": str(folder), "overrides": overrides}
            async with session.post("/v1/functions", json=order) as answer:
                if answer.status != 201:
                    raise RuntimeError(f"the function was not deployed: {await answer.text()}")

    async def _write(self, over: asyncio.Event) -> None:
        while not over.is_set():
            key = self._chance.randrange(KEYS)
            body = json.dumps({"key": key, "number": self.written[key]})
            await asyncio.to_thread(self._kafka.write, TOPIC, [body], [f"k{key}"])
            self.written[key] += 1
            await asyncio.sleep(1 / WRITES_PER_S)

    def _answers(self) -> list[tuple[int, int]]:
        """Return the key and the number of each answer, once all messages have one, or after QUIET_S without a new one."""
        wanted = {(key, number) for key, count in self.written.items() for number in range(count)}
        found: list[tuple[int, int]] = []
        with self._kafka.reader(ANSWERS) as reader:
            until_s = time.monotonic() + QUIET_S
            while wanted - {*found} and time.monotonic() < until_s:
                for one in reader.consume(500, 0.5):
                    if one.error() is None:
                        body = json.loads(one.value())
                        found.append((body["key"], body["number"]))
                        until_s = time.monotonic() + QUIET_S
        return found

    def _check(self, answers: list[tuple[int, int]], report: Report) -> None:
        first = list(dict.fromkeys(answers))
        disordered = sum(
            numbers != sorted(numbers)
            for key in self.written
            if (numbers := [number for one, number in first if one == key])
        )
        report.add("written", self.written.total(), "messages", "> 0")
        report.add("lost", self.written.total() - len(first), "messages", "<= 0")
        report.add("keys_out_of_order", disordered, "", "<= 0")
        report.add("answered_again", len(answers) - len(first), "messages")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=100)
    made.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the sequence of kills")
    made.add_argument("--report", default="soak-kafka", help="name of the file in build/bench")
    options = made.parse_args()
    report = Report(options.report)
    report.note(f"seed {options.seed}")
    with (
        tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        cluster() as kafka,
    ):
        asyncio.run(Soak(Path(folder), options.seed, kafka).run(options.kills, report))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
