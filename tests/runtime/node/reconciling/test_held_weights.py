"""Adapters of a deployed function are fetched when a worker first needs them. Gateway, workers, fetcher and server are real."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from fault_server import Faults, FaultServer
from live import Function, Gate, Gateway, gateway_here, short_folder
from safetensors.torch import save_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANDLER = """
import os

def handler(event, context):
    adapter = context.adapters.open(event) if event else context.snapshot
    return [adapter.load("a")["a"].sum().item(), os.getpid()]
"""
# Each call waits at the gate, so two workers open the adapter at the same time.
TOGETHER = """
import os, gate

def handler(event, context):
    gate.wait("begun")
    return [context.adapters.open(event).load("a")["a"].sum().item(), os.getpid()]
"""
ON_LOOP = """
import asyncio

async def handler(event, context):
    if event == "blocked":
        context.adapters.open("one")
    adapter = await asyncio.to_thread(context.adapters.open, "one")
    return adapter.load("a")["a"].sum().item()
"""
NAMES = ("base", "one", "two")
COUNT = 4096
SEEDS = itertools.count(1)


class Bucket:
    """A server with a base and two adapters. The tensors of each snapshot have a different sum, and another sum in each test."""

    def __init__(self, server: FaultServer, folder: Path) -> None:
        self.server = server
        self.sums = {name: float(COUNT * next(SEEDS)) for name in NAMES}
        for name in NAMES:
            (folder / name).mkdir()
            tensor = torch.full((COUNT,), self.sums[name] / COUNT)
            save_file({"a": tensor}, folder / name / "model.safetensors")

    def settings(self, **others: Any) -> dict[str, Any]:
        adapters = {f"adapters.{name}": f"{self.server.url}/{name}" for name in NAMES[1:]}
        return {"snapshot": f"{self.server.url}/base", **adapters, **others}

    @property
    def fetches(self) -> list[str]:
        """The names of the snapshots whose tensors were sent, with one entry for each time."""
        names = [one.name for one in self.server.requests if one.sent > COUNT]
        return [name.partition("/")[0] for name in names if name.endswith(".safetensors")]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    (folder := tmp_path / "bucket").mkdir()
    with FaultServer(folder) as server:
        yield Bucket(server, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", cache_dir=folder / "cache") as found:
            yield found


async def sum_of(function: Function, event: str) -> float:
    return float((await function.answer(event))[0])


async def test_an_adapter_is_fetched_when_a_call_first_needs_it(gateway: Gateway, bucket: Bucket) -> None:
    function = await gateway.deploy(HANDLER, bucket.settings(**{"scale.idle_timeout_s": 0}), check=False)
    assert await sum_of(function, "") == bucket.sums["base"]
    assert bucket.fetches == ["base"]
    for _ in range(2):
        assert await sum_of(function, "two") == bucket.sums["two"]
        # Wait until the worker has ended, so that the next call has another worker.
        await function.settled()
    assert bucket.fetches == ["base", "two"]
    shown = (await function.status())["settings"]["adapters"]
    assert shown == {name: f"{bucket.server.url}/{name}" for name in NAMES[1:]}


async def test_workers_that_need_an_adapter_at_once_follow_one_fetch(
    gateway: Gateway, bucket: Bucket, gate: Gate
) -> None:
    settings = bucket.settings(**{"scale.max": 2})
    function = await gateway.deploy(TOGETHER, settings, check=False, gate=gate)
    calls = [asyncio.create_task(function.answer("one")) for _ in range(2)]
    begun = [await gate.next("begun") for _ in range(2)]
    for one in begun:
        one.go()
    found = await asyncio.gather(*calls)
    assert [answer[0] for answer in found] == [bucket.sums["one"]] * 2
    assert len({answer[1] for answer in found}) == 2
    assert bucket.fetches.count("one") == 1


async def test_a_fetch_that_fails_ends_its_own_call_alone(gateway: Gateway, bucket: Bucket) -> None:
    function = await gateway.deploy(HANDLER, bucket.settings(), check=False)
    bucket.server.faults = lambda request: Faults(status=404) if request.name.startswith("one/") else Faults()
    error = await function.error("one")
    assert "adapters.one: " in error["message"], error
    assert await sum_of(function, "") == bucket.sums["base"]
    bucket.server.faults = Faults()
    assert await sum_of(function, "one") == bucket.sums["one"]
    error = await function.error("three")
    assert (error["type"], error["details"]["file"]) == ("handler_failed", "handler.py")
    assert "There is no adapter 'three' (there: one, two)" in error["message"]


async def test_an_async_handler_opens_adapters_in_a_thread(gateway: Gateway, bucket: Bucket) -> None:
    function = await gateway.deploy(ON_LOOP, bucket.settings(), check=False)
    error = await function.error("blocked")
    assert "event loop" in error["message"], error
    assert await function.answer("open") == bucket.sums["one"]
