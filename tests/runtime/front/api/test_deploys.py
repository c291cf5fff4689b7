"""Deploys as streams: which function is changed, each step with its time, the end or the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import GATE_MODULE, TRUSTED, Gate, Gateway, failure, gateway_here, until
from pilotflame.runtime.command.client.events import parse_events
from pilotflame.runtime.node.launching import slow_build
from pilotflame.runtime.node.packaging.code import file_digests, identity, pack

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


async def test_a_deploy_tells_where_a_slow_build_is(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slow_build, "FIRST_REPORT_S", 0.1)
    source = "import time\ndef build(context):\n    time.sleep(1)\n" + ECHO
    events = await streamed(gateway.client, folder_of(tmp_path, source))
    (text,) = [data["text"] for name, data in events if name == "note"]
    assert "handler.py, line 3" in text
    assert "build_timeout_s" in text
    assert (await gateway.client.delete(f"/v1/functions/{events[-1][1]['name']}")).status_code == 200


async def test_a_deploy_that_fails_ends_its_stream_with_the_error(gateway: Gateway, tmp_path: Path):
    events = await streamed(gateway.client, folder_of(tmp_path, "x = 1\nx / 0\n"))
    last, error = events[-1]
    assert (last, error["type"]) == ("error", "handler_import_failed")
    assert "handler.py, line 2: ZeroDivisionError" in error["message"]
    assert "line 2" in error["details"]["traceback"]
    assert ("step", {"name": "import", "seconds": None}) in events
    async with gateway.at_home() as owner:
        audit = (await owner.get("/v1/logs/audit")).text
    did = 'did=\\"Deploy a folder or a tar.gz\\"'
    assert f'{did} function=\\"told\\" outcome=\\"422 handler_import_failed\\"' in audit


async def test_a_deploy_that_is_malformed_is_refused_before_its_stream(gateway: Gateway):
    response = await gateway.client.post("/v1/functions", content=b"{", headers=STREAM)
    assert response.status_code == 415


async def test_a_client_that_leaves_ends_its_deploy(
    gateway: Gateway, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    source = "import gate\ndef build(context):\n    gate.wait()\n" + ECHO
    files = folder_of(tmp_path, source, **{"gate.py": GATE_MODULE})
    query = {"folder": "left", "set": f"env.GATE={gate.path}"}
    sent = {"content": pack(files), "headers": {**GZIP, **STREAM}, "params": query}
    async with gateway.client.stream("POST", "/v1/functions", **sent) as response:
        assert response.status_code == 200
        await gate.next()

    async def withdrawn() -> bool:
        return not (gateway.state / "functions" / "left").exists()

    await until(withdrawn, "the end of the deploy")
    assert "Traceback" not in caplog.text
    assert (await gateway.client.get("/v1/functions/left")).status_code == 404


async def test_other_clients_get_one_answer_with_the_steps(gateway: Gateway, tmp_path: Path):
    query = {"folder": "plain", "check": "0"}
    response = await gateway.client.post(
        "/v1/functions", content=pack(folder_of(tmp_path)), headers=GZIP, params=query
    )
    assert response.status_code == 201
    assert [step["name"] for step in response.json()["steps"]] == STEPS[:-1]
    await gateway.client.delete("/v1/functions/plain")


# -- uploads that reuse files


async def reuse(
    client: httpx.AsyncClient, folder: Path, kept: list[Any], base: str, **query: Any
) -> httpx.Response:
    params = {"base": base, "check": "0", **query}
    return await client.post("/v1/functions", content=pack(folder, kept=kept), headers=GZIP, params=params)


async def test_an_upload_reuses_files_of_the_live_revision_of_its_own_function(
    gateway: Gateway, tmp_path: Path
):
    client = gateway.client
    mine = folder_of(tmp_path, **{"pilotflame.toml": 'name = "mine"\n', "data.txt": "x" * 99})
    query = {"set": "name=theirs", "check": "0"}
    for params in ({"check": "0"}, query):
        assert (
            await client.post("/v1/functions", content=pack(mine), headers=GZIP, params=params)
        ).status_code == 201
    (mine / "handler.py").write_text("def handler(event):\n    return open('data.txt').read()[:2]\n")
    files = list(file_digests(mine))
    found = (await client.post("/v1/functions/mine/lacking", json={"files": files})).json()
    assert found["lacking"] == ["handler.py"]
    # The audit log leaves out `lacking`, which changes nothing and which a watching client calls again and again.
    async with gateway.at_home() as owner:
        assert "lacks" not in (await owner.get("/v1/logs/audit")).text
    kept, base = [file for file in files if file["path"] != "handler.py"], f"mine/{found['revision']}"
    response = await reuse(client, mine, kept, base)
    assert response.status_code == 201, response.text
    assert (await client.post("/invoke/mine")).json() == "xx"
    # The base must be the live revision of the same function.
    for wrong, said in ((base, "not the live revision"), ("gone/r1-00000000", "not the live revision")):
        error = failure(await reuse(client, mine, kept, wrong))
        assert (error["status"], error["type"]) == (409, "base_changed")
        assert said in error["message"]
    base = f"mine/{response.json()['revision']}"
    error = failure(await reuse(client, mine, kept, base, set="name=theirs"))
    assert (error["type"], "cannot reuse files of 'mine'" in error["message"]) == ("base_changed", True)
    assert failure(await reuse(client, mine, kept, "mine"))["status"] == 400
    for name in ("mine", "theirs"):
        await client.delete(f"/v1/functions/{name}")


async def test_a_key_reuses_no_files_of_a_function_that_it_does_not_cover(state: Path, tmp_path: Path):
    async with gateway_here(state) as gateway, gateway.at_home() as owner:
        theirs = await gateway.deploy(ECHO, name="theirs", check=False)
        new = {"name": "a", "scopes": ["deploy"], "functions": ["mine"], "policy": TRUSTED}
        key = (await owner.post("/v1/keys", json=new)).json()["key"]
        gateway.client.headers["Authorization"] = f"Bearer {key}"
        mine = folder_of(tmp_path)
        (file,) = file_digests(mine)
        response = await gateway.client.post("/v1/functions/theirs/lacking", json={"files": [file]})
        unknown = await gateway.client.post("/v1/functions/nobody/lacking", json={"files": [file]})
        assert response.status_code == unknown.status_code == 404
        base = f"theirs/{theirs.described['revision']}"
        error = failure(await reuse(gateway.client, mine, [file], base, set="name=mine"))
        assert error["type"] == "forbidden"


# -- folders


async def test_a_folder_that_the_gateway_does_not_see_is_not_read(gateway: Gateway, tmp_path: Path):
    order = {"path": str(folder_of(tmp_path)), "overrides": {"name": "seen"}, "check": False}
    for there, seen_as in ((str(tmp_path), "0" * 64), ("/no/such/folder", "0" * 64)):
        wanted = order | {"path": there, "seen_as": seen_as}
        error = failure(await gateway.client.post("/v1/functions", json=wanted))
        assert (error["status"], error["type"]) == (422, "folder_unseen")
        assert "--upload" in error["remedy"]
    response = await gateway.client.post("/v1/functions", json=order | {"seen_as": identity(tmp_path)})
    assert response.status_code == 201, response.text
    await gateway.client.delete("/v1/functions/seen")
