"""The synchronous client: the same calls from threads and children, with Ctrl-C, and in programs that do not close it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreter import program
from pilotflame import Client
from pilotflame.errors import Cancelled, DeadlineExceeded, HandlerFailed, UnknownFunction
from pilotflame.runtime.command.client.client import Client as CommandClient

HANDLER = """
import asyncio, sys
import pilotflame

async def handler(event):
    if event == "modules":
        return sorted(sys.modules)
    if event == "wait":
        print("waiting", flush=True)
        await asyncio.sleep(60)
    if event == "fail":
        raise ValueError("broken")
    return event
"""


@pytest.fixture(scope="module")
def deployed(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Deploy a function to the gateway `served`. Yield its name."""
    folder = tmp_path_factory.mktemp("called")
    (folder / "handler.py").write_text(HANDLER)
    with CommandClient(served) as client:
        yield str(client.deploy(folder, {"name": "called", "concurrency": "1"})["name"])
        client.delete("v1", "functions", "called")


@pytest.fixture
def function(served: str, deployed: str) -> Iterator[Any]:
    with Client(served, timeout_s=30) as client:
        yield client.function(deployed)


def test_calls_maps_and_jobs(function: Any) -> None:
    assert function.call({"n": 1}) == {"n": 1}
    assert function.call(b"\x00") == b"\x00"
    assert list(function.map(range(50))) == list(range(50))
    with pytest.raises(HandlerFailed, match="broken"):
        list(function.map([1, "fail", 2]))
    assert [type(found) for found in function.map([1, "fail"], return_exceptions=True)] == [
        int,
        HandlerFailed,
    ]
    job = function.submit("later", key="sync")
    assert job.result(30) == "later"
    assert function.job(job.id).status() == "COMPLETED"
    assert job.cancel() == "COMPLETED"


def test_a_call_that_is_late(function: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        function.call("wait", timeout_s=0.5)
    with pytest.raises(DeadlineExceeded):
        function.submit("wait", execution_timeout_s=0.5).result(30)


def test_the_events_of_a_map_are_read_in_the_thread_of_the_caller(function: Any) -> None:
    def events() -> Iterator[str]:
        yield threading.current_thread().name

    assert list(function.map(events())) == [threading.current_thread().name]


def test_a_map_that_is_left_early(function: Any) -> None:
    for value in function.map(iter(int, 1)):
        assert value == 0
        break
    assert function.call(1) == 1


def test_threads_share_a_client(function: Any) -> None:
    found = list[int]()
    threads = [threading.Thread(target=lambda n=n: found.append(function.call(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_a_closed_client_opens_again_and_ends_its_calls(served: str, deployed: str) -> None:
    client = Client(served, timeout_s=30)
    function, ended = client.function(deployed), list[Exception]()

    def call() -> None:
        try:
            function.call("wait")
        except Cancelled as error:
            ended.append(error)

    assert function.call(1) == 1
    waiting = threading.Thread(target=call)
    waiting.start()
    with CommandClient(served) as commands:
        lines = commands.logs(deployed, follow=True)
        assert next(line for line in lines if "waiting" in line["text"])
    client.close()
    waiting.join(10)
    assert "closed" in str(ended[0])
    assert function.call(2) == 2
    client.close()


def test_a_handle_outlives_its_client_and_the_last_one_ends_the_thread(served: str, deployed: str) -> None:
    function = Client(served).function(deployed)
    assert function.call(1) == 1
    names = [thread.name for thread in threading.enumerate()]
    del function
    after = [thread.name for thread in threading.enumerate()]
    assert names.count("pilotflame-client") == after.count("pilotflame-client") + 1


def test_a_forked_child_has_connections_of_its_own(served: str, deployed: str) -> None:
    told = program(
        f"""
        import json, os, pilotflame
        function = pilotflame.Client({served!r}).function({deployed!r})
        assert function.call(1) == 1
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.write(writer, json.dumps(function.call(2)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        print(json.dumps([int(os.read(reader, 9)), *function.map([3, 4])]))
        """
    )
    assert told == [2, 3, 4]


def test_a_fork_while_another_thread_begins_a_call(served: str, deployed: str) -> None:
    told = program(
        f"""
        import asyncio, json, os, signal, threading, pilotflame
        function = pilotflame.Client({served!r}).function({deployed!r})
        begin, begun, forked = asyncio.run_coroutine_threadsafe, threading.Event(), threading.Event()

        def begin_late(*given):
            begun.set()
            forked.wait()
            return begin(*given)

        asyncio.run_coroutine_threadsafe = begin_late
        calling = threading.Thread(target=function.call, args=(1,))
        calling.start()
        begun.wait()
        asyncio.run_coroutine_threadsafe = begin
        reader, writer = os.pipe()
        if not (child := os.fork()):
            signal.alarm(10)
            os.write(writer, json.dumps(function.call(2)).encode())
            os._exit(0)
        forked.set()
        calling.join()
        _, status = os.waitpid(child, 0)
        print(json.dumps([status, int(os.read(reader, 9) if not status else 0)]))
        """
    )
    assert told == [0, 2]


def test_a_program_need_not_close_its_client(served: str, deployed: str) -> None:
    text = f"import pilotflame\nf = pilotflame.Client({served!r}).function({deployed!r})\nprint(f.call(1))"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


@pytest.mark.parametrize("call", ["call('wait')", "submit('wait').result()", "map(['wait'] * 9).__next__()"])
def test_ctrl_c_ends_a_program_that_waits(served: str, deployed: str, call: str) -> None:
    text = f"""
        import signal, pilotflame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pilotflame.Client({served!r}) as client:
            function = client.function({deployed!r})
            assert function.call(1) == 1
            print("ready", flush=True)
            function.{call}
    """
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=10)
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert told.count("Traceback") == 1


def test_a_worker_that_imports_pilotflame_loads_no_client(function: Any) -> None:
    loaded = function.call("modules")
    assert "pilotflame" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"httpx", "aiohttp", "httpcore"}
    assert not [name for name in loaded if name.startswith("pilotflame.runtime.command")]


def test_an_unknown_function(served: str, tmp_path: Path) -> None:
    with Client(served) as client, pytest.raises(UnknownFunction):
        client.function("nobody").call()
