"""A replica: workers that exit, crash, hang or drain, as their callers see it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time

import pytest
from live import Gate, failure, gone, until
from pilotflame.runtime.calls.serving import replica
from pilotflame.runtime.calls.serving.invocation import Invocation

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        ("os._exit(3)", "exit code 3"),
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_worker_that_dies_in_the_handler(deploy, kind: str, statement: str, cause: str):
    source = f"import ctypes, os\n{kind} handler(event):\n    if event:\n        {statement}\n    return os.getpid()"
    function = await deploy(source)
    before = await function.answer(0)
    error = await function.error(1)
    assert (error["status"], error["type"]) == (500, "worker_died")
    assert cause in error["message"]
    await gone(before)
    assert await function.answer(0) != before


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_sys_exit_in_a_handler_is_an_error_like_others(deploy, kind: str):
    source = (
        f"import os, sys\n{kind} handler(event):\n    if event:\n        sys.exit(3)\n    return os.getpid()"
    )
    function = await deploy(source)
    before = await function.answer(0)
    error = await function.error(1)
    assert (error["status"], error["type"]) == (500, "handler_failed")
    assert "SystemExit: 3" in error["message"]
    assert await function.answer(0) == before


HOSTILE = """
from pilotflame.handlers.codec import OutputCodec
OutputCodec.encode = lambda self, value, accept="": (b"x", value)
def handler(event):
    return event
"""


async def test_a_content_type_that_no_header_can_hold_is_refused_by_name(deploy, caplog):
    function = await deploy(HOSTILE)
    assert (await function.call("text/x")).headers["Content-Type"] == "text/x"
    for kind in ("text/x\r\nX-Mine: 1", "text/x\n", "text/\0", "text/\x7f"):
        for headers in ({}, {"Origin": str(function.client.base_url).rstrip("/")}):
            error = failure(await function.client.post(function.path, json=kind, headers=headers))
            assert (error["status"], error["type"]) == (500, "output_invalid")
            assert "Content-Type" in error["message"]
    assert "Traceback" not in caplog.text


LONG_ERRORS = """
from pilotflame.errors import HandlerFailed
from pilotflame.runtime.calls.worker import answers
def handler(event):
    if event == "sent whole":
        answers.MAX_ERROR_BYTES = 1 << 30
    raise HandlerFailed("long", details={"why": "x" * 1_000_000})
"""


@pytest.mark.parametrize("event", ["cut", "sent whole"])
async def test_an_error_has_a_limit_also_if_a_worker_sends_a_longer_one(deploy, event: str):
    error = await (await deploy(LONG_ERRORS)).error(event)
    assert len(str(error)) < 1000
    assert (error["message"] == "long") == (event == "cut")


async def test_a_content_type_has_a_limit(deploy):
    function = await deploy(HOSTILE)
    error = await function.error("text/" + "x" * 2000)
    assert (error["type"], len(error["message"]) < 200) == ("output_invalid", True)


async def test_a_worker_that_is_terminated_drains(deploy, gate: Gate):
    source = """
import gate, os
def handler(event):
    gate.wait(str(event))
    return os.getpid()
def teardown(context):
    gate.say("torn down")
"""
    function = await deploy(source, {"concurrency": 2, "scale.max": 1}, gate=gate, check=False)
    running = asyncio.create_task(function.answer("runs"))
    worker = (await gate.next("runs")).pid
    os.kill(worker, signal.SIGTERM)
    await function.settled(draining=1)
    waiting = asyncio.create_task(function.answer("waits"))
    assert (other := (await gate.next("waits")).pid) != worker
    gate.open()
    assert await asyncio.gather(running, waiting) == [worker, other]
    await gone(worker)
    assert (await gate.next("torn down")).pid == worker


async def test_a_worker_that_streams_faster_than_its_reader_reads_is_ended(deploy, gateway):
    source = """
from pilotflame.runtime.calls.link import stream_credit
stream_credit.Credit._fits = lambda *_: True
def handler(event):
    for _ in range(event):
        yield "x" * 100_000
"""
    function = await deploy(source)
    _reader, writer = await asyncio.open_connection(*gateway.address, limit=1 << 10)
    head = f"POST /invoke/{function.name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 4\r\n\r\n1000".encode())

    async def told() -> bool:
        log = await gateway.client.get("/v1/logs/gateway", params={"lines": 100})
        return "a frame could not be taken" in log.text

    await until(told, "the broken protocol in the gateway's log")
    # The gateway ends the worker. A new worker answers the next call.
    await function.settled(ready=0)
    writer.transport.abort()
    assert (await function.call(1)).text.count("x") == 100_000


async def test_a_worker_that_drains_by_itself_is_killed_if_its_teardown_does_not_end(
    deploy, gate: Gate, monkeypatch
):
    monkeypatch.setattr(replica, "EXIT_TIMEOUT_S", 0.3)
    source = """
import gate, os, threading
def handler(event):
    gate.wait("runs")
    return os.getpid()
def teardown(context):
    gate.say("torn down")
    threading.Event().wait()
"""
    function = await deploy(source, {"scale.max": 1}, gate=gate, check=False)
    running = asyncio.create_task(function.answer())
    worker = (await gate.next("runs")).pid
    os.kill(worker, signal.SIGTERM)
    await function.settled(draining=1)
    # Wait longer than EXIT_TIMEOUT_S. It counts only from the end of the last call, so the running call is not killed.
    await asyncio.sleep(0.5)
    gate.open()
    assert await running == worker
    assert (await gate.next("torn down")).pid == worker
    await gone(worker)


async def test_no_timer_is_left_of_a_caller_who_disconnected(gateway, deploy, gate: Gate):
    source = "import gate\nasync def handler(event):\n    await gate.wait_async(str(event))\n    return event"
    function = await deploy(source, {"concurrency": 4, "scale.max": 1, "timeout_s": 3600.0}, gate=gate)
    kept = asyncio.create_task(function.answer("kept"))
    await gate.next("kept")
    assert gateway.server is not None
    timers = gateway.server.functions.live(function.name).dispatcher._deadlines._timers
    calls = [asyncio.create_task(function.call(f"leaves {n}")) for n in range(3)]
    for _ in calls:
        await gate.next()
    for call in calls:
        call.cancel()
    await function.settled(ready=1, in_flight=1)
    assert [invocation.ended for invocation in timers] == [False]
    gate.open()
    assert await kept == "kept"


async def test_a_result_of_many_megabytes(deploy):
    function = await deploy("def handler(event):\n    return b'x' * event")
    response = await function.call(40_000_000)
    assert len(response.content) == 40_000_000
    assert await function.call(1)


@pytest.mark.parametrize(
    ("kind", "statement", "error_type"),
    [
        ("def", "return b'x' * size", "output_too_large"),
        ("async def", "return b'x' * size", "output_too_large"),
        ("def", "context.progress('x' * size)", "output_too_large"),
        ("def", "raise ValueError('x' * size)", "handler_failed"),
    ],
)
async def test_an_answer_above_the_limit_of_the_link_fails_alone(
    deploy, kind: str, statement: str, error_type: str
):
    source = f"import os\n{kind} handler(size, context):\n    if size:\n        {statement}\n    return os.getpid()"
    function = await deploy(source)
    before = await function.answer(0)
    error = await function.error(257 << 20)
    assert (error["status"], error["type"]) == (500, error_type)
    if error_type == "output_too_large":
        assert "255 MiB" in error["message"]
        assert "Stream" in error["remedy"]
    assert await function.answer(0) == before


async def test_a_piece_of_a_stream_above_the_limit_of_the_link_ends_that_stream(deploy):
    source = "import os\ndef handler(size):\n    yield os.getpid()\n    if size:\n        yield 'x' * size"
    function = await deploy(source)
    before = (await function.call(0)).text
    assert "output_too_large" in (await function.call(257 << 20)).text
    assert (await function.call(0)).text == before


async def test_a_large_body_arrives(deploy):
    function = await deploy("def handler(event):\n    return len(event)")
    assert await function.answer("x" * 15_000_000) == 15_000_000


async def test_results_arrive_in_any_order(deploy, gate: Gate):
    source = "import gate\nasync def handler(event):\n    await gate.wait_async(str(event))\n    return event"
    function = await deploy(source, {"concurrency": 4, "scale.max": 1}, gate=gate)
    calls = {n: asyncio.create_task(function.answer(n)) for n in range(4)}
    arrivals = {int(arrival.word): arrival for arrival in [await gate.next() for _ in range(4)]}
    for n in (2, 0, 3, 1):
        arrivals[n].go()
        assert await calls[n] == n


async def test_an_invocation_sent_to_a_draining_worker_is_not_lost(gateway, deploy):
    """The worker starts to drain while an invocation is on its way to it."""
    function = await deploy("import os\ndef handler(event):\n    return os.getpid()", {"scale.max": 1})
    before = await function.answer()
    await function.settled(ready=1, standby=True)
    assert gateway.server is not None
    revision = gateway.server.functions.live(function.name)
    descriptor = os.pidfd_open(before)
    os.kill(before, signal.SIGTERM)
    # Wait without the event loop, so that the gateway does not notice the worker's drain.
    select.select([descriptor], [], [], 0.05)
    os.close(descriptor)
    now_s = time.monotonic()
    invocation = Invocation("late", b"null", now_s=now_s, deadline_s=now_s + 60, hold_until_s=now_s + 60)
    revision.submit(invocation)
    assert invocation.worker == next(iter(revision.replicas)).name
    assert int((await invocation.output).payload) != before
    await gone(before)


async def test_a_large_report_of_progress_is_dropped_and_told_once(deploy, gateway, caplog):
    source = """
def handler(event, context):
    for size in (300 << 10, 5):
        context.progress("x" * size)
"""
    function = await deploy(source)
    answer = await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": None})
    assert answer.json()["status"] == "COMPLETED"
    said = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert len(said) == 1
    assert "of 307202 bytes was dropped, since the limit is 262144" in said[0]
