"""Three gateways on one PostgreSQL, while random faults hit them: each accepted job ends once, and each webhook arrives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LIMIT_S, Gateway, free_port, gateway_process, short_folder, until
from postgres import PostgresServer, postgres_server
from receiver import Receiver, receiving

FAULTS = int(os.environ.get("PILOTFLAME_TEST_FAULTS", "3"))
CALLERS, GATEWAYS, STOPPED_S = 6, 3, (1.0, 12.0)
pytestmark = pytest.mark.timeout(180 + 30 * FAULTS)
NAME = "counted"
HANDLER = "def handler(event):\n    return event\n"
SETTINGS: dict[str, Any] = {"idempotent": True, "attempts": 100}


class Node:
    """A gateway that can be killed, and started again on its state folder."""

    def __init__(self, folder: Path, database: str) -> None:
        self._folder, self._database, self._port = folder, database, free_port()
        folder.mkdir()
        self._stack = contextlib.AsyncExitStack()
        self.gateway: Gateway

    async def start(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self.gateway = await self._stack.enter_async_context(
            gateway_process(
                self._folder / "state", database=self._database, port=self._port,
                webhook_networks=["127.0.0.0/8"], drain_s=5.0,
            )
        )  # fmt: skip

    async def kill(self) -> None:
        """Kill it. Its workers end with it."""
        await self._stack.aclose()

    def signal(self, number: signal.Signals) -> None:
        assert self.gateway.process is not None
        self.gateway.process.send_signal(number)


@contextlib.asynccontextmanager
async def nodes(database: str) -> AsyncIterator[list[Node]]:
    with short_folder() as folder:
        made = [Node(folder / str(number), database) for number in range(GATEWAYS)]
        try:
            for node in made:
                await node.start()
            yield made
        finally:
            for node in made:
                await node.kill()


async def test_jobs_and_webhooks_outlive_random_faults() -> None:
    chosen, keys, jobs = random.Random(20261130), itertools.count(), dict[int, str]()
    with postgres_server() as server:
        async with nodes(server.url) as running, receiving() as receiver:
            await running[0].gateway.deploy(HANDLER, SETTINGS, name=NAME)
            ending = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CALLERS):
                    tasks.create_task(_submit(running, receiver, keys, jobs, ending))
                for _ in range(FAULTS):
                    await asyncio.sleep(chosen.uniform(0.2, 2.0))
                    await _fault(chosen, running, server)
                ending.set()
            await _check(running[chosen.randrange(GATEWAYS)].gateway, receiver, jobs)


async def _fault(chosen: random.Random, running: list[Node], server: PostgresServer) -> None:
    node = chosen.choice(running)
    match chosen.choice(["kill", "kill", "stop", "database"]):
        case "kill":
            await node.kill()
            await node.start()
        case "stop":
            node.signal(signal.SIGSTOP)
            await asyncio.sleep(chosen.uniform(*STOPPED_S))
            node.signal(signal.SIGCONT)
        case _:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(chosen.uniform(0.0, 2.0))
            await asyncio.to_thread(server.start)


async def _submit(
    running: list[Node], receiver: Receiver, keys: itertools.count[int], jobs: dict[int, str], ending: asyncio.Event
) -> None:  # fmt: skip
    """Submit jobs, each again and again under its key until a gateway has accepted it."""
    while not ending.is_set():
        number = next(keys)
        body = {"input": number, "webhook": f"{receiver.url}/done"}
        for node in itertools.cycle(running[number % GATEWAYS :] + running[: number % GATEWAYS]):
            with contextlib.suppress(httpx.TransportError, RuntimeError):
                answer = await node.gateway.client.post(
                    f"/v2/{NAME}/run", json=body, headers={"Idempotency-Key": f"k{number}"}, timeout=5
                )
                if answer.status_code == 200:
                    jobs[number] = answer.json()["id"]
                    break
                assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.05)


async def _check(gateway: Gateway, receiver: Receiver, jobs: dict[int, str]) -> None:
    for number, job in jobs.items():
        answer = await gateway.client.get(f"/v2/{NAME}/status-sync/{job}?wait={int(LIMIT_S * 1000)}")
        found = answer.json()
        assert (found["status"], found["output"]) == ("COMPLETED", number), found
    assert len(set(jobs.values())) == len(jobs)
    # A job that ended twice would be counted twice.
    counted = (await gateway.client.get(f"/v2/{NAME}/health")).json()["jobs"]
    assert (counted["completed"], counted["inQueue"], counted["inProgress"]) == (len(jobs), 0, 0)

    async def told() -> bool:
        return len({one.id for one in receiver.came}) >= len(jobs)

    await until(told, "a webhook of each job")
    # A webhook may come again, under the same id.
    ids = Counter(one.id for one in receiver.came)
    assert len(ids) == len(jobs)
