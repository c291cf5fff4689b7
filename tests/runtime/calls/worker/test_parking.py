"""A worker that is parked, in a separate process: the test is its gateway, and the device is simulated."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.runtime.calls.link.frames import FrameKind
from pilotflame.runtime.calls.link.worker_spec import Weights
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from safetensors.torch import save_file
from simulated_device import ADDED
from worker_process import WorkerProcess as Process

# The handler can fill the memory of the device. The next allocation on the device then fails, as on a real device.
HANDLER = (
    ADDED
    + """
import os, torch
from torch import nn
from pilotflame.errors import SnapshotError

def build(context):
    with context.snapshot.skeleton():
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    context.snapshot.restore(net, device="simulated")
    return net

def fill(self, storage, size_bytes, *, copied_to, real=simulated_device.SimulatedDevice.resize):
    if size_bytes and os.path.exists("full"):
        raise SnapshotError("The device is full.", remedy="Make room.")
    real(self, storage, size_bytes, copied_to=copied_to)

simulated_device.SimulatedDevice.resize = fill

@torch.inference_mode()
def handler(event, context):
    if event == "held":
        return sum(one.untyped_storage().nbytes() for one in {id(p.untyped_storage()): p for p in context.state.parameters()}.values())
    return context.state(torch.tensor(event)).tolist()

@torch.inference_mode()
def teardown(context):
    open("last", "w").write(str(context.state(torch.ones(64)).tolist()))
"""
)
ONES = [1.0] * 64


@pytest.fixture
def net(tmp_path: Path) -> torch.nn.Module:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    (tmp_path / "weights").mkdir()
    save_file(dict(net.state_dict()), tmp_path / "weights" / "model.safetensors")
    create(tmp_path / "weights").write(tmp_path / "weights" / MANIFEST_NAME)
    return net


@pytest.fixture(params=["", "async "], ids=["thread", "loop"])
def worker(
    request: pytest.FixtureRequest, tmp_path: Path, net: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Process]:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "weights"
    weights = Weights(name="", root=root, manifest=root / MANIFEST_NAME)
    text = textwrap.dedent(HANDLER).replace("def handler", f"{request.param}def handler")
    process = Process(tmp_path, text, weights=(weights,))
    process.ready()
    yield process
    process.close()


@pytest.fixture
def right(net: torch.nn.Module) -> Any:
    with torch.inference_mode():
        return pytest.approx(net(torch.ones(64)).tolist(), rel=1e-5)


def test_it_gives_the_memory_back_and_answers_as_before(worker: Process, right: Any) -> None:
    assert worker.ask(1, ONES) == right
    for turn in range(3):
        worker.send(FrameKind.PARK)
        assert worker.expect(FrameKind.PARKED).json()["freed_bytes"] >= 2 * 4 * (64 * 64 + 64)
        if turn:
            worker.send(FrameKind.UNPARK)
        assert worker.ask(2 + turn, ONES) == right


def test_calls_that_arrive_while_it_parks_are_answered_in_order(worker: Process, right: Any) -> None:
    worker.send(FrameKind.PARK)
    for channel in (1, 2, 3):
        worker.invoke(channel, ONES)
    # If the calls arrive together with PARK, the worker does not park, and sends no PARKED.
    frames = [worker.frame() for _ in range(3)]
    if any(frame is not None and frame.kind == FrameKind.PARKED for frame in frames):
        frames = [*frames, worker.frame()]
    answers = [frame for frame in frames if frame is not None and frame.kind == FrameKind.RESULT]
    assert [(frame.channel, json.loads(frame.payload)) for frame in answers] == [
        (n, right) for n in (1, 2, 3)
    ]


def test_what_it_is_told_last_holds(worker: Process, right: Any) -> None:
    for number, kind in enumerate((FrameKind.PARK, FrameKind.UNPARK, FrameKind.PARK, FrameKind.PARK)):
        worker.send(kind, number)
    # The worker may ignore a PARK if the next frame has already arrived, but it answers the last PARK.
    while worker.expect(FrameKind.PARKED).channel != 3:
        pass
    worker.invoke(1, ONES)
    frame = worker.expect(FrameKind.RESULT)
    assert json.loads(frame.payload) == right
    assert worker.ask(2, ONES) == right


def test_a_call_that_is_cancelled_before_it_woke_does_not_run(worker: Process, right: Any) -> None:
    worker.send(FrameKind.PARK)
    worker.expect(FrameKind.PARKED)
    worker.invoke(1, ONES)
    worker.send(FrameKind.CANCEL, 1)
    frame = worker.frame()
    assert frame is not None
    assert frame.channel == 1
    assert worker.ask(2, ONES) == right


def test_without_room_it_returns_the_calls_and_ends(worker: Process, tmp_path: Path) -> None:
    worker.send(FrameKind.PARK)
    worker.expect(FrameKind.PARKED)
    (tmp_path / "full").touch()
    worker.invoke(1, ONES)
    worker.invoke(2, ONES)
    worker.expect(FrameKind.DRAIN)
    assert [worker.expect(FrameKind.RETURNED).channel for _ in range(2)] == [1, 2]
    worker.send(FrameKind.DRAIN)
    assert worker.frame() is None
    assert worker.exit_code() == 0
    assert "The device is full" in worker.errors()


def test_it_ends_while_parked_after_a_teardown_with_its_weights(
    worker: Process, tmp_path: Path, right: Any
) -> None:
    worker.send(FrameKind.PARK)
    worker.expect(FrameKind.PARKED)
    worker.send(FrameKind.DRAIN)
    worker.expect(FrameKind.DRAIN)
    assert worker.frame() is None
    assert worker.exit_code() == 0
    assert json.loads((tmp_path / "last").read_text()) == right


def test_a_worker_without_weights_is_parked_too(tmp_path: Path) -> None:
    process = Process(tmp_path, "def handler(event):\n    return event\n")
    process.ready()
    process.send(FrameKind.PARK)
    assert process.expect(FrameKind.PARKED).json() == {"freed_bytes": 0, "reserved": []}
    assert process.ask(1, "still there") == "still there"
    process.close()


# Its hooks and its handler write into the file `log`. The files `broken`, `slow` and `full` make the hooks fail or wait.
HOOKED = """
import asyncio, os

def log(word):
    with open("log", "a") as file:
        file.write(word + " ")

def setup(context):
    return {"held": 7}

async def park(context):
    if os.path.exists("broken"):
        raise RuntimeError("the engine is stuck")
    if os.path.exists("slow"):
        log("begun")
        await asyncio.to_thread(lambda: open("slow").read())
    log("park")
    return context.state["held"]

KIND unpark(context):
    if os.path.exists("full"):
        raise RuntimeError("no room")
    log("unpark")

def teardown(context):
    log("teardown")

KIND handler(event, context):
    log(event)
    return event
"""


@pytest.fixture(params=["def", "async def"], ids=["thread", "loop"])
def hooked(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Process]:
    """A worker whose handler has the hooks `park` and `unpark`."""
    monkeypatch.chdir(tmp_path)
    process = Process(tmp_path, HOOKED.replace("KIND", request.param))
    process.ready()
    yield process
    process.close()


def written(process: Process) -> list[str]:
    return (process.folder / "log").read_text().split()


def drain(process: Process) -> None:
    process.send(FrameKind.DRAIN)
    process.expect(FrameKind.DRAIN)
    assert process.frame() is None
    assert process.exit_code() == 0


def test_the_hooks_run_around_each_park(hooked: Process) -> None:
    for turn in ("a", "b"):
        hooked.send(FrameKind.PARK)
        assert hooked.expect(FrameKind.PARKED).json()["freed_bytes"] == 7
        assert hooked.ask(1, turn) == turn
    assert written(hooked) == ["park", "unpark", "a", "park", "unpark", "b"]


def test_if_park_fails_the_worker_goes_on(hooked: Process, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    hooked.send(FrameKind.PARK)
    assert hooked.expect(FrameKind.PARKED).json()["freed_bytes"] == 0
    assert hooked.ask(1, "a") == "a"
    assert written(hooked) == ["a"]
    drain(hooked)
    assert "park(context) failed" in hooked.errors()


def test_if_unpark_fails_another_worker_gets_the_calls(hooked: Process, tmp_path: Path) -> None:
    hooked.send(FrameKind.PARK)
    hooked.expect(FrameKind.PARKED)
    (tmp_path / "full").touch()
    hooked.invoke(1, "a")
    hooked.expect(FrameKind.DRAIN)
    assert hooked.expect(FrameKind.RETURNED).channel == 1
    hooked.send(FrameKind.DRAIN)
    assert hooked.frame() is None
    assert written(hooked) == ["park", "teardown"]
    assert "unpark(context) failed: RuntimeError('no room')" in hooked.errors()


def test_a_worker_that_ends_while_parked_is_not_unparked(hooked: Process) -> None:
    hooked.send(FrameKind.PARK)
    hooked.expect(FrameKind.PARKED)
    drain(hooked)
    assert written(hooked) == ["park", "teardown"]


def test_teardown_waits_for_a_running_hook(hooked: Process, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow")
    hooked.send(FrameKind.PARK)
    # `open` returns when the hook has opened its end of the pipe. So the hook is running.
    with (tmp_path / "slow").open("w"):
        hooked.send(FrameKind.DRAIN)
        hooked.expect(FrameKind.DRAIN)
        assert written(hooked) == ["begun"]
    hooked.expect(FrameKind.PARKED)
    assert hooked.frame() is None
    assert written(hooked) == ["begun", "park", "teardown"]
