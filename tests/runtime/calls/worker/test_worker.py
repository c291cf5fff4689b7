"""A worker in a separate process, over a real socket pair: the test is its gateway."""

import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pilotflame.runtime.calls.link.frames import FrameKind, encode
from pilotflame.runtime.calls.worker.weights import most_common_dtype
from pilotflame.snapshot.named import Snapshots
from worker_process import LIMIT_S
from worker_process import WorkerProcess as Process


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(text: str, **spec: Any) -> Process:
        for name in ("inside", "gate"):
            os.mkfifo(tmp_path / name)
        made.append(Process(tmp_path, text, **spec))
        return made[-1]

    yield start
    for process in made:
        process.close()


# `handler` uses two pipes: `inside` reports that it runs, and it waits for `gate`. So no test needs to sleep.
BLOCKS = """
def handler(event):
    if event == "wait":
        open("inside", "wb").close()
        open("gate", "rb").close()
    return event
"""


def test_a_standby_sends_nothing_until_it_is_activated(worker: Callable[..., Process]) -> None:
    process = worker("def setup():\n    print('set up')\ndef handler(event): return event", concurrency=3)
    assert process.ready() == {
        "window": 3, "slots": 3, "batching": False, "limit": 1, "device": "cpu", "dtype": "",
    }  # fmt: skip
    assert process.ask(1, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize("prefix", ["", "async "])
def test_secrets_and_state_are_there_in_setup_and_handler(
    worker: Callable[..., Process], prefix: str
) -> None:
    process = worker(f"""
        import os, sys
        def build(context):
            return [os.environ.get("SECRET"), os.environ["PLAIN"]]
        {prefix}def setup(context):
            return [*context.state, os.environ["SECRET"], context.id]
        {prefix}def handler(event, context):
            return [context.state, context.id, context.attempt, context.traceparent, context.function,
                    context.revision, 0 < context.remaining_ms() <= 5000, "aiohttp" in sys.modules]
        """, env={"PLAIN": "p"})  # fmt: skip
    process.ready(SECRET="s")
    answer = process.ask(4, None, attempt=2, traceparent="00-a-b-01", remaining_s=5.0)
    assert answer == [[None, "p", "s", ""], "i4", 2, "00-a-b-01", "tone", "r1-abc", True, False]


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize("batch", ["", "@pilotflame.batch(max_size=2)\n"])
def test_the_time_of_a_job_counts_from_the_start_of_its_call(
    worker: Callable[..., Process], prefix: str, batch: str
) -> None:
    event = "[(context.items or [context])[0].remaining_ms()]"
    process = worker(f"import pilotflame\n{batch}{prefix}def handler(event, context):\n    return {event}\n")
    process.ready()
    left_ms = process.ask(1, None, remaining_s=5.0, execution_s=50.0)
    assert 0 < (left_ms if batch else left_ms[0]) - 40_000 <= 10_000


@pytest.mark.parametrize(("setup", "handler"), [("async ", ""), ("", "async ")])
def test_hooks_and_handler_may_be_of_different_kinds(
    worker: Callable[..., Process], setup: str, handler: str
) -> None:
    process = worker(f"""
        {setup}def setup(): return 5
        {handler}def handler(event, context): return context.state + event
        {setup}def teardown(): open("torn", "w").write("down")
    """)
    process.ready()
    assert process.ask(1, 2) == 7
    process.send(FrameKind.DRAIN)
    assert process.exit_code() == 0
    assert (process.folder / "torn").read_text() == "down"


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(
    ("statement", "expected"), [("raise ValueError('no')", "ValueError: no"), ("raise SystemExit(3)", "SystemExit: 3")]
)  # fmt: skip
def test_a_setup_that_fails_is_reported_and_ends_the_worker(
    worker: Callable[..., Process], prefix: str, statement: str, expected: str
) -> None:
    process = worker(f"def handler(event): pass\n{prefix}def setup(context):\n    {statement}\n")
    process.send(FrameKind.ACTIVATE)
    head = process.expect(FrameKind.FAILED).json()
    assert head["type"] == "handler_setup_failed"
    assert f"at handler.py, line 3: {expected}" in head["message"]
    assert process.frame() is None
    assert process.exit_code() == 0


def test_system_exit_in_a_handler_fails_its_call_only(
    worker: Callable[..., Process],
) -> None:
    process = worker("import sys\ndef handler(event):\n    return sys.exit(3) if event else 'fine'\n")
    process.ready()
    process.invoke(1, 1)
    error = process.expect(FrameKind.ERROR)
    assert (error.channel, error.json()["type"]) == (1, "handler_failed")
    assert "handler.py, line 3: SystemExit: 3" in error.json()["message"]
    assert process.ask(2, 0) == "fine"


def test_draining_finishes_what_runs_and_returns_the_rest(worker: Callable[..., Process]) -> None:
    process = worker(BLOCKS + "def teardown(): open('torn', 'w').write('down')\n")
    process.ready()
    for channel in (1, 2, 3):
        process.invoke(channel, "wait")
    process.wait_for("inside")
    process.send(FrameKind.DRAIN)
    process.expect(FrameKind.DRAIN)
    assert [process.expect(FrameKind.RETURNED).channel for _ in range(2)] == [2, 3]
    process.invoke(4)
    assert process.expect(FrameKind.RETURNED).channel == 4
    process.release("gate")
    assert process.expect(FrameKind.RESULT).channel == 1
    assert process.frame() is None
    assert process.exit_code() == 0
    assert (process.folder / "torn").read_text() == "down"


@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_waits_is_given_back_while_a_call_runs(worker: Callable[..., Process], prefix: str) -> None:
    source = BLOCKS.replace("def", f"{prefix}def", 1)
    if prefix:
        # Wait on another thread, so that the event loop can receive ASK_BACK.
        source = source.replace(
            'open("gate", "rb").close()', 'await asyncio.to_thread(lambda: open("gate", "rb").close())'
        )
    process = worker(f"import asyncio{source}")
    process.ready()
    for channel in (1, 2, 3):
        process.invoke(channel, "wait" if channel == 1 else None)
    process.wait_for("inside")
    process.send(FrameKind.ASK_BACK)
    assert [process.expect(FrameKind.RETURNED).channel for _ in range(2)] == [2, 3]
    process.send(FrameKind.ASK_BACK)  # nothing is left to give back
    process.invoke(4, "later")
    process.release("gate")
    assert [process.expect(FrameKind.RESULT).channel for _ in range(2)] == [1, 4]
    process.invoke(5, "wait")
    process.wait_for("inside")
    process.send(FrameKind.DRAIN)
    process.expect(FrameKind.DRAIN)
    # After DRAIN, the queue has one empty group for each thread, which ends the thread. ASK_BACK must not remove these groups.
    process.send(FrameKind.ASK_BACK)
    process.release("gate")
    assert process.expect(FrameKind.RESULT).channel == 5
    assert process.frame() is None
    assert process.exit_code() == 0


def test_sigterm_drains_and_tells_the_gateway(worker: Callable[..., Process]) -> None:
    process = worker(BLOCKS)
    process.ready()
    process.invoke(1, "wait")
    process.invoke(2)
    process.wait_for("inside")
    process.process.send_signal(signal.SIGTERM)
    process.expect(FrameKind.DRAIN)
    assert process.expect(FrameKind.RETURNED).channel == 2
    process.process.send_signal(signal.SIGTERM)  # a second SIGTERM changes nothing
    process.invoke(3)  # as if the gateway sends it before it reads DRAIN
    assert process.expect(FrameKind.RETURNED).channel == 3
    process.send(FrameKind.DRAIN)  # tells the worker that no more invocations come
    process.release("gate")
    assert process.expect(FrameKind.RESULT).channel == 1
    assert process.frame() is None
    assert process.exit_code() == 0


def test_a_standby_that_drains_ends_at_once(worker: Callable[..., Process]) -> None:
    process = worker("def handler(event): pass")
    process.send(FrameKind.DRAIN)
    process.expect(FrameKind.DRAIN)
    assert process.frame() is None
    assert process.exit_code() == 0


def test_a_worker_ends_with_its_gateway_although_its_handler_runs(
    worker: Callable[..., Process],
) -> None:
    process = worker(BLOCKS)
    process.ready()
    process.invoke(1, "wait")
    process.wait_for("inside")
    process.sock.close()
    assert process.exit_code() == 1


BATCH_BLOCKS = """
import pilotflame
@pilotflame.batch(max_size=3)
def handler(events):
    open("inside", "wb").close()
    open("gate", "rb").close()
    return [len(events)] * len(events)
"""


def test_a_group_runs_together_and_one_that_has_not_started_is_returned(
    worker: Callable[..., Process],
) -> None:
    process = worker(BATCH_BLOCKS)
    assert process.ready()["limit"] == 3
    for channel, more in [(1, 2), (2, 1), (3, 0), (4, 1), (5, 0), (6, 2), (7, 1)]:
        process.invoke(channel, **({"more": more} if more else {}))
    process.wait_for("inside")
    process.send(FrameKind.DRAIN)
    process.expect(FrameKind.DRAIN)
    assert [process.expect(FrameKind.RETURNED).channel for _ in range(4)] == [4, 5, 6, 7]
    process.invoke(8)  # the rest of a group whose first part was returned
    assert process.expect(FrameKind.RETURNED).channel == 8
    process.release("gate")
    frames = [process.expect(FrameKind.RESULT) for _ in range(3)]
    assert [(frame.channel, frame.payload) for frame in frames] == [(1, b"3"), (2, b"3"), (3, b"3")]
    assert process.frame() is None
    assert process.exit_code() == 0


def test_64_plain_handlers_run_at_the_same_time_in_one_worker(worker: Callable[..., Process]) -> None:
    process = worker(
        "import threading\nbarrier = None\ndef setup():\n    global barrier\n    barrier = threading.Barrier(64)\n"
        "def handler(event):\n    barrier.wait(50)\n",
        concurrency=64,
    )
    process.ready()
    for channel in range(1, 65):
        process.invoke(channel)
    assert sorted(process.expect(FrameKind.RESULT).channel for _ in range(64)) == list(range(1, 65))


MEASURED = """
    import pilotflame
    sizes = []
    @pilotflame.batch(max_size=6, example=[{{"n": 1}}, {{"n": 2}}])
    {prefix}def handler(events, context):
        if len(events) > 2 and "{fails}":
            raise MemoryError("no room")
        sizes.append([len(events), [event["n"] for event in events][:3], len(context.items)])
        context.progress(5)
        return [sizes] * len(events)
"""


@pytest.mark.parametrize("prefix", ["", "async "])
def test_the_example_is_measured_before_the_worker_is_ready(
    worker: Callable[..., Process], prefix: str
) -> None:
    process = worker(MEASURED.format(prefix=prefix, fails=""))
    process.send(FrameKind.ACTIVATE, 0, {"measure": True})
    head = process.expect(FrameKind.READY).json()
    assert [size for size, _, _ in head["curve"]] == [1, 2, 4, 6]
    assert all(0 < p50_s <= p95_s for _, p50_s, p95_s in head["curve"])
    assert head["limit"] == 6
    process.invoke(1, {"n": 7})
    process.expect(FrameKind.PROGRESS)
    *measured, last = json.loads(process.expect(FrameKind.RESULT).payload)
    expected = [[1, [1], 1], [2, [1, 2], 2], [4, [1, 2, 1], 4], [6, [1, 2, 1], 6]]
    assert measured == [one for one in expected for _ in range(4)]
    assert last == [1, [7], 1]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_example_that_fails_is_logged_and_the_worker_is_ready(
    worker: Callable[..., Process], prefix: str
) -> None:
    process = worker(MEASURED.format(prefix=prefix, fails="yes"))
    process.send(FrameKind.ACTIVATE, 0, {"measure": True})
    head = process.expect(FrameKind.READY).json()
    assert [size for size, _, _ in head["curve"]] == [1, 2]
    assert head["limit"] == 2  # the largest size that did not run out of memory
    process.send(FrameKind.DRAIN)
    assert process.exit_code() == 0
    assert "Measuring the example of @batch failed at handler.py" in process.errors()


@pytest.mark.parametrize(("example", "order"), [("", {"measure": True}), (", example=1", {})])
def test_nothing_is_measured_without_an_example_or_a_request(
    worker: Callable[..., Process], example: str, order: dict[str, bool]
) -> None:
    process = worker(f"""
        import pilotflame
        ran = []
        @pilotflame.batch(max_size=2{example})
        def handler(events):
            ran.append(len(events))
            return [ran] * len(events)
    """)
    process.send(FrameKind.ACTIVATE, 0, order)
    assert not process.expect(FrameKind.READY).json().get("curve")
    assert process.ask(1) == [1]


def test_answers_from_before_a_crash_arrive(worker: Callable[..., Process]) -> None:
    process = worker("import os\ndef handler(event):\n    return os._exit(9) if event == 3 else event\n")
    process.ready()
    process.sock.sendall(
        b"".join(encode(FrameKind.INVOKE, n, b'{"id":"a"}', str(n).encode()) for n in (1, 2, 3, 4))
    )
    assert [process.expect(FrameKind.RESULT).channel for _ in range(2)] == [1, 2]
    assert process.frame() is None
    assert process.exit_code() == 9


def test_a_stream_waits_for_more_and_ends_when_cancelled(worker: Callable[..., Process]) -> None:
    process = worker("""
        def handler(event):
            try:
                for number in range(event): yield number
            finally:
                open("closed", "w").close()
    """)
    process.ready()
    process.invoke(1, 1_000_000)
    first = [process.expect(FrameKind.CHUNK) for _ in range(64)]
    assert [int(frame.payload) for frame in first] == list(range(64))
    process.send(FrameKind.MORE, 1, {"count": 2})
    assert [int(process.expect(FrameKind.CHUNK).payload) for _ in range(2)] == [64, 65]
    process.send(FrameKind.CANCEL, 1)
    assert process.expect(FrameKind.ERROR).json()["type"] == "cancelled"
    assert (process.folder / "closed").exists()
    process.invoke(2, 1)
    process.expect(FrameKind.CHUNK)
    assert process.expect(FrameKind.END).channel == 2


def test_a_cancelled_task_makes_room(worker: Callable[..., Process]) -> None:
    process = worker("""
        import asyncio
        async def handler(event):
            if event == "wait":
                open("inside", "wb").close()
                await asyncio.Event().wait()
            return event
    """)
    process.ready()
    process.invoke(1, "wait")
    process.invoke(2, "next")
    process.wait_for("inside")
    process.send(FrameKind.CANCEL, 1)
    assert process.expect(FrameKind.ERROR).json()["type"] == "cancelled"
    assert json.loads(process.expect(FrameKind.RESULT).payload) == "next"


def test_what_it_logs_carries_the_invocation(worker: Callable[..., Process]) -> None:
    process = worker("""
        import logging
        def handler(event, context):
            context.log.info("from the context")
            logging.getLogger("theirs").warning("from elsewhere")
    """)
    process.ready()
    process.ask(7)
    process.send(FrameKind.DRAIN)
    assert process.exit_code() == 0
    errors = process.errors()
    assert "INFO i7 from the context" in errors
    assert "WARNING i7 from elsewhere" in errors


def test_a_teardown_that_fails_goes_to_the_log(worker: Callable[..., Process]) -> None:
    process = worker("def handler(event): pass\ndef teardown():\n    raise ValueError('stuck')\n")
    process.ready()
    process.send(FrameKind.DRAIN)
    assert process.exit_code() == 0
    assert "teardown(context) failed at handler.py, line 3: ValueError: stuck" in process.errors()


def test_a_rehearsal_that_fails_does_not_stop_the_worker(worker: Callable[..., Process]) -> None:
    process = worker("def handler(event): return 'fine'\ndef rehearse():\n    raise ValueError('lines')\n")
    select.select([process.sock], [], [], LIMIT_S)  # wait until PRIMED has arrived
    process.ready()
    assert process.ask(1) == "fine"
    process.send(FrameKind.DRAIN)
    assert process.exit_code() == 0
    assert "rehearse(context) failed at handler.py, line 3: ValueError: lines" in process.errors()


@pytest.mark.parametrize(
    ("dtypes", "found"),
    [([[]], ""), ([["F32", "BF16", "BF16"]], "BF16"), ([["F32", "BF16"], ["F32"], []], "F32")],
)
def test_the_dtype_is_that_of_most_tensors(dtypes: list[list[str]], found: str) -> None:
    named: Any = []
    for number, some in enumerate(dtypes):
        tensors = [SimpleNamespace(dtype=dtype) for dtype in some]
        manifest = SimpleNamespace(tensors=tensors)
        named.append(SimpleNamespace(name=f"s{number}", manifest=manifest, compares=False))
    assert most_common_dtype(Snapshots(named)) == found
    assert most_common_dtype(None) == ""
