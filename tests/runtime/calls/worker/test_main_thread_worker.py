"""A plain handler has the main thread of its worker: its state, its signals and its processes are as in a script."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Gateway, gateway_process, gone
from pilotflame.runtime.calls.link.frames import FrameKind
from worker_process import WorkerProcess

live = pytest.mark.asyncio(loop_scope="module")

STATE = """
import decimal, threading
from contextvars import ContextVar
import numpy, torch

word = ContextVar("word", default="lost")
word.set("kept")
decimal.getcontext().prec = 5
numpy.seterr(divide="raise")
torch.set_grad_enabled(False)
torch.set_default_device("meta")
CALLS = 3
barrier = None

def setup():
    global barrier
    barrier = threading.Barrier(CALLS)

def handler(together):
    if together:
        barrier.wait(50)
    return [
        word.get(), decimal.getcontext().prec, numpy.geterr()["divide"], torch.is_grad_enabled(),
        torch.zeros(1).device.type, threading.current_thread().name,
    ]
"""
KEPT = ["kept", 5, "raise", False, "meta"]


@live
async def test_the_handler_finds_the_state_that_its_import_has_left(deploy: Callable[..., Any]) -> None:
    function = await deploy(STATE)
    assert await function.answer(False) == [*KEPT, "MainThread"]


@live
async def test_calls_at_the_same_time_have_copies_of_this_state(deploy: Callable[..., Any]) -> None:
    function = await deploy(STATE, {"concurrency": 3, "scale.max": 1})
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.answer(True)) for _ in range(3)]
    answers = sorted(task.result() for task in asked)
    assert answers == [[*KEPT, name] for name in ("MainThread", "handler-1", "handler-2")]


@live
@pytest.mark.parametrize("prefix", ["", "async "])
async def test_the_main_thread_has_an_event_loop(deploy: Callable[..., Any], prefix: str) -> None:
    source = f"""
import asyncio, threading

{prefix}def setup(context):
    return threading.current_thread() is threading.main_thread()

def handler(event, context):
    found = []
    loop = asyncio.get_event_loop()
    loop.add_signal_handler(10, found.append, context.state)
    loop.call_soon(lambda: __import__("os").kill(__import__("os").getpid(), 10))
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.remove_signal_handler(10)
    return found
"""
    function = await deploy(source)
    assert [await function.answer() for _ in range(2)] == [[True], [True]]


@live
async def test_an_alarm_interrupts_the_handler(deploy: Callable[..., Any]) -> None:
    source = """
import os, signal, time

class Late(Exception):
    pass

def on_alarm(number, frame):
    raise Late

signal.signal(signal.SIGALRM, on_alarm)

def handler(seconds):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(seconds)
    except Late:
        return ["late", os.getpid()]
    return ["in time", os.getpid()]
"""
    function = await deploy(source, {"scale.max": 1})
    word, pid = await function.answer(1000)
    assert word == "late"
    # The alarm of a call that has ended raises between two calls, and fails neither of them.
    assert await function.answer(0) == ["in time", pid]
    await function.logged("Between two calls")
    assert await function.answer(1000) == ["late", pid]


SIGTERM = """
import os, signal

calls = []

def on_term(number, frame):
    calls.append(number)

AT_IMPORT

def handler(event):
    AT_CALL
    if event:
        os.kill(os.getpid(), signal.SIGTERM)
    return [calls, signal.getsignal(signal.SIGTERM) is on_term, os.getpid()]
"""
SET = "signal.signal(signal.SIGTERM, on_term)"


@live
@pytest.mark.parametrize("place", ["AT_IMPORT", "AT_CALL"])
async def test_the_handlers_own_sigterm_handler_does_not_replace_the_drain(
    deploy: Callable[..., Any], place: str
) -> None:
    source = SIGTERM.replace(place, SET).replace("AT_IMPORT", "").replace("AT_CALL", "pass")
    function = await deploy(source, {"scale.max": 1})
    _, own, pid = await function.answer(False)
    assert own
    assert await function.answer(True) == [[signal.SIGTERM], True, pid]
    assert (await function.answer(False))[2] != pid


PROCESSES = """
import multiprocessing, os, signal

def held(_):
    kept = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGINT) == signal.default_int_handler
    sockets = [one for one in map(target, os.listdir("/proc/self/fd")) if "socket" in one or "event" in one or "pidfd" in one]
    return [*kept, signal.set_wakeup_fd(-1), sockets]

def target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""

PREFIXdef handler(event):
    with multiprocessing.Pool(2) as pool:
        children = pool.map(held, range(2))
    out = target(1)
    return os.getpid(), [[*kept, [one for one in sockets if one != out]] for *kept, sockets in children]
"""


@live
async def test_processes_of_a_handler_have_what_they_would_have_in_a_script(
    deploy: Callable[..., Any],
) -> None:
    function = await deploy(PROCESSES.replace("PREFIX", ""), {"scale.max": 1})
    answers = [await function.answer() for _ in range(3)]
    # SIGTERM ends the children, and must not end their worker.
    assert len({pid for pid, _ in answers}) == 1
    assert answers[-1][1] == [[True, True, -1, []]] * 2


@live
async def test_an_async_handlers_worker_outlives_its_processes(deploy: Callable[..., Any]) -> None:
    function = await deploy(PROCESSES.replace("PREFIX", "async "), {"scale.max": 1})
    answers = [await function.answer() for _ in range(3)]
    assert len({pid for pid, _ in answers}) == 1
    assert [child[:3] for child in answers[-1][1]] == [[True, True, -1]] * 2


# Runs native code for minutes, during which Python handles no signal.
IN_NATIVE_CODE = """
import hashlib, os
def handler(event):
    if event:
        with open(event, "w") as pipe:
            pipe.write(str(os.getpid()))
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path, IN_NATIVE_CODE)
    yield process
    process.close()


def test_sigterm_drains_while_the_handler_is_in_native_code(worker: WorkerProcess, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    worker.ready()
    worker.invoke(1)
    assert worker.expect(FrameKind.RESULT).channel == 1
    worker.invoke(2, str(tmp_path / "pid"))
    worker.invoke(3)
    worker.wait_for("pid")
    worker.process.send_signal(signal.SIGTERM)
    worker.expect(FrameKind.DRAIN)
    assert worker.expect(FrameKind.RETURNED).channel == 3


@live
@pytest.mark.parametrize("both", [True, False], ids=["gateway-and-zygote", "gateway"])
async def test_a_killed_gateway_ends_a_worker_in_native_code(state: Path, tmp_path: Path, both: bool) -> None:
    os.mkfifo(tmp_path / "pid")
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(IN_NATIVE_CODE)
        calling = asyncio.create_task(function.call(str(tmp_path / "pid")))
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        (zygote,) = await function.pids("zygote")
        assert gateway.process is not None
        gateway.process.kill()
        if both:
            os.kill(zygote, signal.SIGKILL)
        await gone(pid)
        calling.cancel()


@live
async def test_a_killed_zygote_drains_a_worker_whose_handler_ignores_sigterm(
    gateway: Gateway, deploy: Callable[..., Any], tmp_path: Path
) -> None:
    source = """
import os, signal
def setup():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def handler(event):
    return os.getpid()
"""
    function = await deploy(source, {"scale.min": 1, "scale.max": 1})
    pid = await function.answer()
    (zygote,) = await function.pids("zygote")
    os.kill(zygote, signal.SIGKILL)
    await gone(pid)
    assert await function.answer() != pid


def test_what_it_prints_in_teardown_belongs_to_no_call(tmp_path: Path) -> None:
    process = WorkerProcess(
        tmp_path,
        """
        import json, threading
        from pilotflame.runtime.calls.worker import output
        def handler(event): return event
        def teardown():
            main = threading.current_thread() is threading.main_thread()
            open("last", "w").write(json.dumps([main, output.current.get()]))
        """,
    )
    process.ready()
    assert process.ask(1, "x") == "x"
    process.send(FrameKind.DRAIN)
    assert process.exit_code() == 0
    assert json.loads((tmp_path / "last").read_text()) == [True, None]
    process.close()
