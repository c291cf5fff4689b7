"""What handlers may ask of their worker: progress, retirement, concurrency. Over a real link."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from live import Gate, Gateway
from pilotflame.errors import OutputInvalid
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.frames import Frame, FrameKind, FrameReader
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.calls.worker import host
from pilotflame.runtime.calls.worker.host import WorkerHost

LIMIT_S = 30.0


class Rig:
    """A host without a worker, and the gateway's end of its link."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.gateway, sock = socket.socketpair()
        self.gateway.setblocking(False)
        self.link = Link(sock)
        self.link.bind(lambda _frame: None, lambda: None)
        self.sizes: list[int] = []
        self.drained: list[int] = []
        self.host = WorkerHost(
            self.link,
            self.loop,
            self,  # type: ignore[arg-type]
            lambda: self.drained.append(threading.get_ident()),
            on_loop=True,
        )
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def resize(self, concurrency: int) -> None:
        self.sizes.append(concurrency)

    async def progress(self) -> tuple[int, Any]:
        async with asyncio.timeout(LIMIT_S):
            while not self._frames:
                self._frames = self._reader.feed(await self.loop.sock_recv(self.gateway, 1 << 16))
        frame = self._frames.pop(0)
        assert frame.kind == FrameKind.PROGRESS
        return frame.channel, json.loads(frame.payload)

    def close(self) -> None:
        self.link.close()
        self.gateway.close()


@pytest.fixture
async def rig() -> Any:
    made = Rig()
    yield made
    made.close()


async def test_the_first_report_is_sent_at_once_then_the_latest_of_each_channel(rig: Rig) -> None:
    for n in range(1000):
        rig.host.progress(1, n)
        rig.host.progress(2, {"n": n})
    assert await rig.progress() == (1, 0)
    assert sorted([await rig.progress(), await rig.progress()], key=str) == [(1, 999), (2, {"n": 999})]
    rig.host.progress(3, "later")
    assert await rig.progress() == (3, "later")


async def test_threads_may_report_progress(rig: Rig) -> None:
    async with asyncio.TaskGroup() as tasks:
        for channel in range(8):
            tasks.create_task(asyncio.to_thread(rig.host.progress, channel, channel))
    heard = {await rig.progress() for _ in range(8)}
    assert heard == {(channel, channel) for channel in range(8)}


async def test_what_is_not_json_is_refused(rig: Rig) -> None:
    for value in (object(), b"bytes", float("nan")):
        with pytest.raises(OutputInvalid):
            rig.host.progress(1, value)


async def test_progress_on_a_closed_link_does_nothing(rig: Rig) -> None:
    rig.host.progress(1, 1)
    rig.host.progress(1, 2)
    rig.link.close()
    rig.host.progress(1, 3)


async def test_the_loop_acts_before_the_calling_thread_goes_on(rig: Rig) -> None:
    def ask() -> list[int]:
        rig.host.retire()
        rig.host.resize(5)
        return [*rig.drained, *rig.sizes]

    assert await asyncio.to_thread(ask) == [threading.get_ident(), 5]
    assert ask() == [threading.get_ident(), threading.get_ident(), 5, 5]


async def test_a_busy_loop_is_reported_when_the_calling_thread_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "LOOP_TIMEOUT_S", 0.02)
    asking = threading.Thread(target=rig.host.retire)
    asking.start()
    # Block the event loop until the thread has gone on.
    asking.join(LIMIT_S)
    assert rig.drained == []
    assert "busy for 0.02 s; going on before the drain" in capfd.readouterr().err
    await asyncio.sleep(0)
    assert rig.drained == [threading.get_ident()]


async def test_concurrency_is_limited(rig: Rig) -> None:
    for wanted in (-1, 0, 10**9):
        rig.host.resize(wanted)
    assert rig.sizes == [1, 1, 1024]


# -- in a worker

live = pytest.mark.asyncio(loop_scope="module")


@live
async def test_context_retire_ends_the_worker_after_its_answer(
    deploy: Callable[..., Any], gate: Gate
) -> None:
    source = """
import os
def handler(event, context):
    if event:
        context.retire()
    return os.getpid()
"""
    function = await deploy(source, {"scale.max": 1, "concurrency": 1})
    first = await function.answer()
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.answer(True)) for _ in range(4)]
    pids = [task.result() for task in asked]
    assert first in pids
    assert len(set(pids)) == 4  # an invocation that is queued at a retiring worker runs on another


@live
@pytest.mark.parametrize("last", ["return", "yield"])
async def test_a_worker_whose_engine_has_stopped_ends_after_its_answer(
    deploy: Callable[..., Any], last: str
) -> None:
    source = f"""
import os
from pilotflame.errors import EngineStopped
async def handler(event):
    if event:
        raise EngineStopped("no more steps")
    {last} os.getpid()
"""
    function = await deploy(source, {"scale.max": 1})
    first = (await function.call()).text
    assert (await function.error(True))["type"] == "engine_stopped"
    assert (await function.call()).text != first


@live
@pytest.mark.parametrize(
    ("prefix", "wait", "last"),
    [
        ("", "gate.wait()", "return"),
        ("async ", "await gate.wait_async()", "return"),
        ("", "gate.wait()", "yield"),
    ],
    ids=["plain", "async", "generator"],
)
async def test_progress_and_extra_of_an_invocation(
    gateway: Gateway, deploy: Callable[..., Any], gate: Gate, prefix: str, wait: str, last: str
) -> None:
    source = f"""
import gate
{prefix}def handler(event, context):
    context.progress({{"half": context.extra["who"]}})
    {wait}
    {last} dict(context.extra)
"""
    function = await deploy(source, gate=gate)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    assert gateway.server is not None
    now_s = time.monotonic()
    invocation = Invocation(
        "i", b"", now_s=now_s, deadline_s=now_s + LIMIT_S, hold_until_s=now_s + LIMIT_S,
        extra={"who": "me"}, on_progress=heard.put_nowait, streaming=last == "yield",
    )  # fmt: skip
    gateway.server.functions.live(function.name).submit(invocation)
    async with asyncio.timeout(LIMIT_S):
        assert json.loads(await heard.get()) == {"half": "me"}
    gate.open()
    answer = (await invocation.output).payload
    piece = await invocation.stream.take() if invocation.stream is not None else answer
    piece = piece[0] if isinstance(piece, list) else piece
    assert json.loads(piece) == {"who": "me"}


@live
async def test_without_an_invocation_the_host_does_nothing(deploy: Callable[..., Any]) -> None:
    source = """
def setup(context):
    context.progress("setting up")
    context.resize(3)
def handler(event, context):
    return dict(context.extra)
"""
    assert await (await deploy(source)).answer() == {}


@live
async def test_a_larger_concurrency_is_used_and_a_smaller_one_kept(
    deploy: Callable[..., Any], gate: Gate
) -> None:
    source = """
import gate
async def handler(event, context):
    context.resize(event["size"])
    await gate.wait_async(str(event["n"]))
"""
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(function.answer({"size": 3, "n": 0}))
        first = await gate.next("0")
        for n in (1, 2, 3):
            tasks.create_task(function.answer({"size": 3 if n < 3 else 1, "n": n}))
        there = [await gate.next(), await gate.next()]
        first.go()
        await gate.next("3")  # call 3 sets the concurrency to 1 while three calls run
        tasks.create_task(function.answer({"size": 1, "n": 4}))
        for arrival in there:
            arrival.go()
        gate.open()
        await gate.next("4")


@live
async def test_after_a_resize_all_running_invocations_die_with_the_worker(
    deploy: Callable[..., Any], gate: Gate
) -> None:
    source = """
import gate, os
async def handler(event, context):
    context.resize(3)
    await gate.wait_async(str(event))
    os._exit(1)
"""
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.error(n)) for n in range(3)]
        arrived = [await gate.next() for _ in range(3)]
        arrived[0].go()
    # No call may run again, because all three had started: the handler has raised the concurrency.
    assert [task.result()["type"] for task in asked] == ["worker_died"] * 3
    assert len(gate.arrived) == 3
