"""An import or `build` that takes long: the function's log, and the error at the limit, say where it is."""

from __future__ import annotations

import asyncio

import pytest
from live import LIMIT_S, Gate, Gateway, failure
from pilotflame.runtime.ground.telemetry.log_files import LogLine
from pilotflame.runtime.node.launching import slow_build

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMPORT = """import gate

gate.wait("importing")


def handler(event):
    return event
"""
BUILD = """import gate


def build():
    gate.wait("building")


def handler(event):
    return event
"""
# The handler blocks the signal. So no Python code answers the gateway, as in native code that does not return to Python.
NATIVE = """import signal

import gate


def handler(event):
    return event


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 6})
gate.wait("stuck")
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_REPORT_S", "NEXT_REPORT_S", "ANSWER_S"):
        monkeypatch.setattr(slow_build, name, 0.2)


async def reported(gateway: Gateway, name: str) -> LogLine:
    """Return the first line about a slow build in the log of a function that is not deployed yet."""
    assert gateway.server is not None
    async with asyncio.timeout(LIMIT_S):
        async for line in gateway.server.functions.logs.of_function(name).follow(100):
            if "build_timeout_s" in line.text:
                return line
    raise AssertionError(f"the log of {name} ended")


@pytest.mark.parametrize(("source", "line"), [(IMPORT, 3), (BUILD, 5)], ids=["import", "build"])
async def test_the_log_says_where_it_is_and_what_limits_it(
    gateway: Gateway, gate: Gate, soon: None, source: str, line: int
):
    name = f"slow-{line}"
    deploying = asyncio.create_task(gateway.deploy(source, name=name, gate=gate))
    arrival = await gate.next()
    told = await reported(gateway, name)
    assert told.level == "warning"
    assert f"at handler.py, line {line} (inside gate.py, line " in told.text
    assert "build_timeout_s (600 s)" in told.text
    arrival.go()
    function = await deploying
    assert await function.answer(7) == 7


async def test_the_error_at_the_limit_names_file_line_and_setting(gateway: Gateway, gate: Gate, soon: None):
    error = failure(await gateway.send(BUILD, {"build_timeout_s": 0.5}, gate=gate))
    assert "0.5 s" in error["message"]
    assert "at handler.py, line 5 (inside gate.py, line " in error["message"]
    assert "build_timeout_s" in error["remedy"]
    assert error["details"] == {"file": "handler.py", "line": 5}


async def test_native_code_that_no_signal_reaches_is_told_apart(gateway: Gateway, gate: Gate, soon: None):
    error = failure(await gateway.send(NATIVE, {"build_timeout_s": 0.5}, name="native", gate=gate))
    assert "in native code" in error["message"]
    # The log shows where the native code runs, by the Python frames around it.
    assert await gateway.function("native").logged("line 11 in <module>")
