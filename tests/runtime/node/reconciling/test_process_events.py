"""The reports of processes that fail."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENGINE_FAILS = """
import os, sys

def setup(context):
    if not os.fork():
        sys.stderr.write("(engine) no room for keys and values\\n")
        os._exit(1)
    os.wait()
    raise RuntimeError("The engine did not start. See above.")

def handler(event):
    return event
"""


async def test_a_failed_setup_shows_what_its_processes_have_printed(gateway: Any) -> None:
    answer = await gateway.send(ENGINE_FAILS)
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert error["type"] == "handler_setup_failed"
    assert error["details"]["printed"] == "(engine) no room for keys and values"
