"""Long calls beside deploys, restarts and a rollback: the number of calls that are not answered.

The calls are longer than `drain_s`, and start evenly. A replacement that is refused, because too many revisions drain, is
tried again. In the part "one", `max_workers` is 1: a deploy then exceeds the limit by its first worker, and the next
replacement waits until the old worker has ended. Each call must be answered with 200 by the revision that was live when it
began, and none may be repeated.

    python infra/bench/soak_revisions.py
    python infra/bench/soak_revisions.py --calls 40 --call-s 4 --concurrency 10 --deploys 3 --restarts 1 --drain-s 2
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from report import Report, parser
from servers import gateway_command, running

NAME = "long"
HANDLER = """
import asyncio
VERSION = {version}
async def handler(event):
    await asyncio.sleep(event["s"])
    return [VERSION, event["n"]]
"""
SETTINGS = "concurrency = {concurrency}\n\n[scale]\nmax = {most}\n"
AGAIN_S = 0.5
REFUSED = 409


class Callers:
    """Starts the calls evenly, and counts their answers."""

    def __init__(self, session: aiohttp.ClientSession, options: argparse.Namespace) -> None:
        self._session, self._options = session, options
        self.versions = Counter[int]()
        self.failed: list[str] = []

    async def run(self) -> None:
        every_s = self._options.call_s / self._options.concurrency
        async with asyncio.TaskGroup() as calls:
            for number in range(self._options.calls):
                calls.create_task(self._call(number))
                await asyncio.sleep(every_s)

    async def _call(self, number: int) -> None:
        try:
            event = {"s": self._options.call_s, "n": number}
            async with self._session.post(f"/invoke/{NAME}", json=event) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed.append(repr(error))
            return
        if response.status == 200 and answer[1] == number:
            self.versions[answer[0]] += 1
        else:
            self.failed.append(f"{response.status} {str(answer)[:200]}")


class Owner:
    """Replaces the revision, evenly over the time of the calls."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path, options: argparse.Namespace) -> None:
        self._session, self._folder, self._options = session, folder, options
        self._versions = itertools.count(1)
        self.refused = self.done = 0

    async def deploy(self) -> int:
        source = HANDLER.format(version=next(self._versions))
        await asyncio.to_thread((self._folder / "handler.py").write_text, source)
        async with self._session.post("/v1/functions", json={"path": str(self._folder)}) as response:
            return await self._checked(response)

    async def act(self, action: str) -> int:
        async with self._session.post(f"/v1/functions/{NAME}/{action}", json={}) as response:
            return await self._checked(response)

    async def _checked(self, response: aiohttp.ClientResponse) -> int:
        if response.status not in (200, 201, REFUSED):
            raise RuntimeError(f"{response.status} {await response.text()}")
        return response.status

    async def run(self, over_s: float) -> None:
        options = self._options
        steps: list[Callable[[], Awaitable[int]]] = [self.deploy] * options.deploys
        steps += [lambda: self.act("restart")] * options.restarts + [
            lambda: self.act("rollback")
        ] * options.rollbacks
        random.Random(1).shuffle(steps)
        began_s = time.monotonic()
        for number, step in enumerate(steps):
            await asyncio.sleep(began_s + over_s * (number + 1) / (len(steps) + 1) - time.monotonic())
            while await step() == REFUSED:
                self.refused += 1
                await asyncio.sleep(AGAIN_S)
            self.done += 1


async def soak(url: str, folder: Path, options: argparse.Namespace) -> tuple[Callers, Owner]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        owner, callers = Owner(session, folder, options), Callers(session, options)
        await owner.deploy()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(callers.run())
            tasks.create_task(owner.run(options.calls * options.call_s / options.concurrency))
    return callers, owner


def tell(report: Report, part: str, callers: Callers, owner: Owner) -> None:
    answered, unanswered = callers.versions.total(), len(callers.failed)
    report.add(f"{part}_unanswered", unanswered, f"of {answered + unanswered} calls", "<= 0")
    report.add(f"{part}_replacements", owner.done, f"with {owner.refused} refusals in between")
    report.note(f"{part}: answers by version: {dict(sorted(callers.versions.items()))}")
    for text in callers.failed[:10]:
        report.note(f"{part}: not answered: {text}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=200)
    options.add_argument("--call-s", type=float, default=45.0)
    options.add_argument("--concurrency", type=int, default=50)
    options.add_argument("--deploys", type=int, default=5)
    options.add_argument("--restarts", type=int, default=2)
    options.add_argument("--rollbacks", type=int, default=1)
    options.add_argument("--drain-s", type=float, default=30.0)
    arguments = options.parse_args()
    report = Report("soak-revisions")
    for part, limits, most in (("free", {}, 4), ("one", {"max_workers": 1}, 1)):
        with tempfile.TemporaryDirectory(
            prefix="pf-revisions-", dir="/tmp", ignore_cleanup_errors=True
        ) as name:
            folder = Path(name) / NAME
            folder.mkdir()
            concurrency = arguments.concurrency if most == 1 else max(1, arguments.concurrency // 2)
            (folder / "pilotflame.toml").write_text(SETTINGS.format(concurrency=concurrency, most=most))
            command = gateway_command(
                state_dir=str(Path(name) / "state"), drain_s=arguments.drain_s, **limits
            )
            with report.part(part), running("pilotflame", command) as server:
                server.wait_line()
                tell(report, part, *asyncio.run(soak(server.url, folder, arguments)))
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
