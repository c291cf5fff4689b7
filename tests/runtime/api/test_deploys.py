"""Deploys as streams: which function is changed, each step with its time, the end or the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Gateway
from pilotflame.runtime.commands.client import parse_events
from pilotflame.runtime.functions.code import pack

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"
GZIP = {"Content-Type": "application/gzip"}
STREAM = {"Accept": "text/event-stream"}
STEPS = ["upload", "code", "packages", "import", "build", "proof start"]


def folder_of(tmp_path: Path, handler: str = ECHO, **files: str) -> Path:
    (tmp_path / "handler.py").write_text(handler)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


async def streamed(client: httpx.AsyncClient, folder: Path, **query: Any) -> list[tuple[str, Any]]:
    response = await client.post(
        "/v1/functions", content=pack(folder), headers={**GZIP, **STREAM}, params={"folder": "told", **query}
    )
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
    return [(name, json.loads(data)) for name, data in parse_events([response.content])]


async def test_a_deploy_tells_its_function_and_its_steps(gateway: Gateway, tmp_path: Path):
    source = "import time\ndef build(context):\n    time.sleep(0.05)\n" + ECHO
    events = await streamed(gateway.client, folder_of(tmp_path, source))
    assert ("function", {"name": "told", "replaces": None}) in events
    begun = [data["name"] for name, data in events if name == "step" and data["seconds"] is None]
    ended = {
        data["name"]: data["seconds"]
        for name, data in events
        if name == "step" and data["seconds"] is not None
    }
    assert [*begun, "build"] == [*STEPS[:4], "proof start", "build"]
    assert list(ended) == STEPS
    assert all(seconds >= 0 for seconds in ended.values())
    assert ended["build"] >= 0.05
    last, deployed = events[-1]
    assert (last, deployed["name"], deployed["replaces"]) == ("completed", "told", None)
    assert {step["name"]: step["seconds"] for step in deployed["steps"]} == ended
    again = await streamed(gateway.client, tmp_path)
    (target,) = [data for name, data in again if name == "function"]
    assert target["replaces"]["revision"] == deployed["revision"]
    assert (await gateway.client.delete("/v1/functions/told")).status_code == 200


async def test_a_deploy_that_fails_ends_its_stream_with_the_error(gateway: Gateway, tmp_path: Path):
    events = await streamed(gateway.client, folder_of(tmp_path, "x = 1\nx / 0\n"))
    last, error = events[-1]
    assert (last, error["type"]) == ("error", "handler_import_failed")
    assert "handler.py, line 2: ZeroDivisionError" in error["message"]
    assert "line 2" in error["details"]["traceback"]
    assert ("step", {"name": "import", "seconds": None}) in events
    async with gateway.at_home() as owner:
        audit = (await owner.get("/v1/logs/audit")).text
    assert 'did=\\"Deploy a folder or a tar.gz\\" outcome=\\"422 handler_import_failed\\"' in audit


async def test_a_deploy_that_is_malformed_is_refused_before_its_stream(gateway: Gateway):
    response = await gateway.client.post("/v1/functions", content=b"{", headers=STREAM)
    assert response.status_code == 415


async def test_other_clients_get_one_answer_with_the_steps(gateway: Gateway, tmp_path: Path):
    query = {"folder": "plain", "check": "0"}
    response = await gateway.client.post(
        "/v1/functions", content=pack(folder_of(tmp_path)), headers=GZIP, params=query
    )
    assert response.status_code == 201
    assert [step["name"] for step in response.json()["steps"]] == STEPS[:-1]
    await gateway.client.delete("/v1/functions/plain")
