"""The control routes: valid and invalid deploys, status, logs, delete, health, metrics, OpenAPI."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
from pathlib import Path

import httpx
import pytest
from live import TRUSTED, Gate, Gateway, failure, gateway_here
from pilotflame.runtime.ground.settings import state_dir
from pilotflame.runtime.jobs.sqlite.store import DATABASE_FILE
from pilotflame.runtime.node.packaging.code import pack

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"


# -- invalid deploys


LONG = """
from typing import Annotated, Any
from pydantic import BaseModel, Field, WithJsonSchema
class Event(BaseModel):
    text: str = Field(min_length=4_000_000)
    odd: Annotated[Any, WithJsonSchema({"enum": {"a": 1}})]
def handler(event: Event):
    pass
"""


async def test_a_function_cannot_enlarge_or_break_the_list_of_functions(gateway: Gateway):
    function = await gateway.deploy(LONG)
    try:
        assert (listed := await gateway.client.get("/v1/functions")).status_code == 200
        assert len(listed.content) < 20_000
        assert listed.json()["functions"][0]["input_example"] == {}
        assert (await gateway.client.get("/openapi.json")).status_code == 200
    finally:
        await gateway.client.delete(f"/v1/functions/{function.name}")


async def test_lists_have_no_schemas(gateway: Gateway, deploy):
    function = await deploy("def handler(event: int) -> str:\n    return str(event)\n")
    assert (await function.status())["input_schema"] == {"type": "integer"}
    [listed] = (await gateway.client.get("/v1/functions")).json()["functions"]
    assert (listed["input_schema"], listed["output_schema"], listed["input_example"]) == ({}, {}, {})
    [model] = (await gateway.client.get("/replicate/v1/models")).json()["results"]
    assert model["latest_version"]["openapi_schema"]["components"]["schemas"]["Input"]["properties"] == {}


async def test_a_function_whose_schema_cannot_be_read_is_refused(gateway: Gateway):
    odd = LONG.replace("(BaseModel)", "(BaseModel, json_schema_extra={'$defs': {'a': 1}})")
    error = failure(await gateway.send(odd, name="broken"))
    assert (error["type"], "input_schema.$defs.a" in error["message"]) == ("launcher_error", True)


BROKEN = {
    "no-handler": ({}, {}, "handler_import_failed", "handler.py is not in the function's folder (there: gate.py"),
    "syntax": ({"handler.py": "def handler(event):\n    return (\n"}, {}, "handler_import_failed", "handler.py, line 2"),
    "raises": ({"handler.py": "x = 1\nx / 0\n"}, {}, "handler_import_failed", "handler.py, line 2: ZeroDivisionError"),
    "exits": ({"handler.py": "import sys\nsys.exit(3)\n"}, {}, "handler_import_failed", "handler.py, line 2: SystemExit"),
    "inner": (
        {"handler.py": "import inner\n" + ECHO, "inner.py": "\n\nraise OSError('x')\n"}, {},
        "handler_import_failed", "inner.py, line 3: OSError",
    ),
    "module": ({"handler.py": "import nosuchmodule\n"}, {}, "handler_import_failed", "nosuchmodule"),
    "requirement": (
        {"handler.py": ECHO, "requirements.txt": "nosuchpackage-pilotflame==1\n"}, {},
        "requirements_unmet", "nosuchpackage-pilotflame",
    ),
    "no-function": ({"handler.py": "x = 1\n"}, {}, "handler_signature_invalid", "defines no `handler`"),
    "arity": ({"handler.py": "def handler():\n    pass\n"}, {}, "handler_signature_invalid", "`handler in handler.py` is defined as ()"),
    "build": (
        {"handler.py": "def build(context):\n    raise RuntimeError('no')\n" + ECHO}, {},
        "handler_build_failed", "handler.py, line 2: RuntimeError: no",
    ),
    "setup": (
        {"handler.py": "def setup(context):\n    raise RuntimeError('no')\n" + ECHO}, {},
        "handler_setup_failed", "handler.py, line 2: RuntimeError: no",
    ),
    "setting": ({"handler.py": ECHO}, {"scale.mx": 3}, "settings_invalid", "scale.max"),
    "toml": ({"handler.py": ECHO, "pilotflame.toml": "idempotnt = true\n"}, {}, "settings_invalid", "idempotent"),
    "no-weights": ({"handler.py": ECHO}, {"snapshot": "weights"}, "snapshot_error", "does not exist"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "settings", "code", "said"), BROKEN.values(), ids=BROKEN)
async def test_an_invalid_deploy_is_refused_with_its_reason(
    gateway: Gateway, files: dict, settings: dict, code: str, said: str
):
    response = await gateway.send(None, settings, files=files, name="broken")
    error = failure(response)
    assert error["type"] == code
    assert response.status_code == (500 if code == "handler_setup_failed" else 422)
    assert said in error["message"]
    assert "\n" not in error["message"]
    if (place := said.partition(", line ")[2]) and code.startswith("handler"):
        assert error["details"]["file"] == said.partition(",")[0]
        assert error["details"]["line"] == int(place.partition(":")[0])
    assert (await gateway.client.get("/v1/functions")).json() == {"functions": []}


@pytest.mark.parametrize(
    "code", ["handler_import_failed", "requirements_unmet", "handler_signature_invalid", "snapshot_error"]
)
async def test_an_error_has_a_remedy(gateway: Gateway, code: str):
    files, settings, _, _ = next(
        case
        for name, case in BROKEN.items()
        if case[2] == code and name not in ("syntax", "raises", "exits", "inner")
    )
    assert failure(await gateway.send(None, settings, files=files, name="broken"))["remedy"]


TORCH = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
def build(context):
    with context.snapshot.skeleton():
        net = Net()
    context.snapshot.restore(net)
    return net
def handler(event, context):
    return context.state.first(torch.tensor(event)).tolist()
"""

MISFITS = {
    "lacking": (lambda weights, torch: weights.pop("first.bias"), "missing", "first.bias"),
    "too-many": (lambda weights, torch: weights.update(other=torch.zeros(2)), "unexpected", "other"),
    "shape": (lambda weights, torch: weights.update({"first.bias": torch.zeros(5)}), "shapes", "first.bias"),
    "dtype": (
        lambda weights, torch: weights.update({"first.bias": torch.zeros(3).half()}),
        "dtypes",
        "first.bias",
    ),
}


@pytest.mark.parametrize(("spoil", "kind", "tensor"), MISFITS.values(), ids=MISFITS)
async def test_a_snapshot_that_does_not_fit_is_refused(
    gateway: Gateway, tmp_path: Path, spoil, kind: str, tensor: str
):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weights = {"first.weight": torch.ones(3, 4), "first.bias": torch.zeros(3)}
    spoil(weights, torch)
    save_file(weights, tmp_path / "model.safetensors")
    error = failure(await gateway.send(TORCH, {"snapshot": str(tmp_path)}))
    assert error["status"] == 422
    assert tensor in error["message"]
    assert "handler.py, line 10" in error["message"]
    assert error["remedy"]
    assert error["details"]["exception"] == "snapshot_mismatch"
    assert error["details"][kind] == [tensor]


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "bad_json"),
        (b'{"path": "relative"}', "application/json", 422, "settings_invalid"),
        (b'{"path": "/nowhere/at/all"}', "application/json", 422, "settings_invalid"),
        (b'{"path": "/tmp", "oops": 1}', "application/json", 400, "bad_json"),
        (b"no archive", "application/gzip", 422, "code_invalid"),
    ],
    ids=["json", "relative", "nowhere", "unknown", "archive"],
)
async def test_an_invalid_deploy_request_is_refused(
    client, content: bytes, kind: str, status: int, code: str
):
    error = failure(await client.post("/v1/functions", content=content, headers={"Content-Type": kind}))
    assert (error["status"], error["type"]) == (status, code)
    assert error["remedy"]


async def test_a_deploy_of_another_media_type_is_refused(client):
    response = await client.post("/v1/functions", content=b"x", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": ""}, {"Content-Type": "no type"}], ids=["none", "empty", "odd"]
)
async def test_an_archive_without_its_media_type_is_refused(client, tmp_path: Path, headers: dict[str, str]):
    """A web page can send such a request without a preflight."""
    (tmp_path / "handler.py").write_text(ECHO)
    response = await client.post("/v1/functions", content=pack(tmp_path), headers=headers)
    error = failure(response)
    assert (error["status"], error["type"]) == (415, "unsupported_media")
    assert (await client.get("/v1/functions")).json() == {"functions": []}


async def test_folders_are_not_read_for_remote_callers(state, tmp_path: Path):
    async with gateway_here(state, host="0.0.0.0") as gateway:
        async with gateway.at_home() as owner:
            error = failure(await owner.post("/v1/functions", json={"path": str(tmp_path)}))
        assert (error["status"], error["type"]) == (422, "code_invalid")
        assert "--upload" in error["remedy"]


# -- valid deploys


async def test_an_archive_is_deployed(client, tmp_path: Path):
    (tmp_path / "handler.py").write_text(ECHO)
    (tmp_path / "pilotflame.toml").write_text('name = "packed"\n[scale]\nmax = 2\n')
    response = await client.post(
        "/v1/functions", content=pack(tmp_path), params={"set": "scale.max=3", "check": "0"},
        headers={"Content-Type": "application/gzip"},
    )  # fmt: skip
    assert response.status_code == 201, response.text
    assert response.json()["settings"]["scale"]["max"] == 3
    assert (await client.post("/invoke/packed", json=[1])).json() == [1]
    assert (await client.delete("/v1/functions/packed")).json() == {"deleted": "packed"}
    assert failure(await client.post("/invoke/packed", json=1))["status"] == 404
    assert failure(await client.delete("/v1/functions/packed"))["type"] == "unknown_function"


async def test_an_archive_without_a_name_is_refused(client, tmp_path: Path):
    (tmp_path / "handler.py").write_text(ECHO)
    headers = {"Content-Type": "application/gzip"}
    error = failure(await client.post("/v1/functions", content=pack(tmp_path), headers=headers))
    assert (error["status"], error["type"]) == (422, "settings_invalid")
    assert "has no name" in error["message"]
    assert "set=name=NAME" in error["remedy"]
    response = await client.post(
        "/v1/functions", content=pack(tmp_path), headers=headers, params={"folder": "Named So"}
    )
    assert response.json()["name"] == "named-so"
    assert (await client.delete("/v1/functions/named-so")).status_code == 200


async def test_a_deploy_names_the_key_that_deployed_what_it_replaces(state):
    async with gateway_here(state) as gateway, gateway.at_home() as owner:
        function = await gateway.deploy(ECHO, name="mine", check=False)
        new = {"name": "ci of shop", "scopes": ["deploy"], "policy": TRUSTED}
        key = (await owner.post("/v1/keys", json=new)).json()["key"]
        gateway.client.headers["Authorization"] = f"Bearer {key}"
        second = (await gateway.send(ECHO, name="mine", check=False)).json()
        assert second["replaces"]["revision"] == function.described["revision"]
        assert second["replaces"]["deployed_by"] == "local"
        third = (await gateway.send(ECHO, name="mine", check=False)).json()
        assert (third["replaces"]["number"], third["replaces"]["deployed_by"]) == (2, "key ci of shop")


async def test_a_deploy_leaves_no_worker_running(deploy):
    function = await deploy(ECHO)
    status = await function.settled(ready=0, standby=True, zygote=True)
    assert await function.pids("worker") == []
    assert (status["queued"], status["in_flight"], status["last_cold_start_ms"]) == (0, 0, None)
    await function.answer(1)
    status = await function.settled(ready=1)
    assert status["last_cold_start_ms"] > 0
    assert sum(status["last_cold_start_phases_ms"].values()) == pytest.approx(
        status["last_cold_start_ms"], rel=0.02
    )


async def test_list_and_status(deploy, client):
    function = await deploy("def handler(event: int) -> str:\n    return str(event)")
    assert [one["name"] for one in (await client.get("/v1/functions")).json()["functions"]] == [function.name]
    status = await function.status()
    assert status["input_schema"] == {"type": "integer"}
    assert status["output_schema"] == {"type": "string"}
    assert (status["kind"], status["streaming"], status["batch"]) == ("plain", False, None)
    assert failure(await client.get("/v1/functions/nobody"))["status"] == 404
    assert failure(await client.get("/v1/functions/nobody/logs"))["status"] == 404


# -- logs


async def test_printed_lines_are_logged_with_their_source(deploy):
    source = """
import os
print("at import")
def build(context):
    print("in build")
def setup(context):
    print("in setup")
def teardown(context):
    print("in teardown")
def handler(event, context):
    print("in handler")
    os.write(1, b"native\\n")
    os.write(2, b"without end of line")
    context.log.warning("logged")
    return os.getpid()
"""
    function = await deploy(source, {"scale.idle_timeout_s": 0}, check=False)
    response = await function.call(None, X_Request_Id="id-1")
    worker = response.headers["x-worker-id"]
    await function.logged("in teardown")
    said = {line["text"]: line["source"] for line in await function.lines()}
    assert said["at import"] == said["in build"] == "zygote"
    assert said["in setup"] == said["in handler"] == said["native"] == said["in teardown"] == worker
    assert said["without end of line"] == said["logged"] == worker
    levels = {(line["text"], line["level"]): line["request_id"] for line in await function.lines()}
    # Output of C code has a request id only if the output of the invocation is captured, as that of a job.
    assert levels["in setup", "info"] == levels["native", "info"] == ""
    assert levels["in handler", "info"] == levels["logged", "warning"] == "id-1"


async def test_output_before_a_segmentation_fault_is_logged(deploy):
    source = """
import ctypes, faulthandler, os
faulthandler.enable()
def handler(event):
    os.write(1, b"last words\\n")
    ctypes.string_at(0)
"""
    function = await deploy(source)
    error = await function.error()
    assert (error["status"], error["type"]) == (500, "worker_died")
    assert "SIGSEGV" in error["message"]
    for words in ("last words", "Fatal Python error: Segmentation fault", "handler.py"):
        await function.logged(words)


async def test_following_a_log_streams_new_lines(deploy, client):
    function = await deploy("def handler(event):\n    print('said', event)")
    await function.call("before")
    url = f"/v1/functions/{function.name}/logs"
    async with client.stream("GET", url, params={"follow": "1", "lines": "1000"}) as response:
        lines = (json.loads(line)["text"] async for line in response.aiter_lines())

        async def heard(text: str) -> bool:
            async for line in lines:
                if line == text:
                    return True
            return False

        assert await heard("said before")
        for n in range(3):
            await function.call(n)
            assert await heard(f"said {n}")
    tail = (await client.get(url, params={"lines": "2"})).text.splitlines()
    assert [json.loads(line)["text"] for line in tail] == ["said 1", "said 2"]


@pytest.mark.parametrize("query", ["lines=-1", "lines=x", "lines=99999999", "follow=maybe"])
async def test_an_invalid_query_is_refused(deploy, client, query: str):
    function = await deploy(ECHO, check=False)
    error = failure(await client.get(f"/v1/functions/{function.name}/logs?{query}"))
    assert error["status"] == 400


# -- health, metrics, OpenAPI


async def test_health_metrics_and_openapi(deploy, client: httpx.AsyncClient):
    function = await deploy("def handler(event: int) -> int:\n    return event", {"max_queue": 7})
    await function.answer(1)
    assert (await function.error("x"))["status"] == 422
    assert (await client.get("/healthz")).json() == {"status": "alive"}
    assert (await client.get("/readyz")).json() == {"status": "ready"}
    text = (await client.get("/metrics")).text
    assert f'pilotflame_invocations_total{{code="200",function="{function.name}",source="http"}} 1.0' in text
    assert f'pilotflame_invocations_total{{code="422",function="{function.name}",source="http"}} 1.0' in text
    assert f'pilotflame_workers{{function="{function.name}",state="ready"}} 1.0' in text
    assert (
        f'pilotflame_cold_start_phase_seconds_count{{function="{function.name}",phase="restore"}} 1.0' in text
    )
    described = (await client.get("/openapi.json")).json()
    assert f"/invoke/{function.name}" in described["paths"]


async def test_unknown_functions_are_not_counted(client):
    for n in range(3):
        await client.post(f"/invoke/made-up-{n}", json=1)
    assert "made-up" not in (await client.get("/metrics")).text


async def test_a_full_disk_is_not_ready(state, monkeypatch):
    monkeypatch.setattr(state_dir, "MIN_FREE_BYTES", shutil.disk_usage(state.parent).total + 1)
    async with gateway_here(state) as gateway:
        response = await gateway.client.get("/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "disk_full"})
        assert "retry-after" in response.headers
        assert (await gateway.client.get("/healthz")).status_code == 200
        form = {"content": ("file.bin", b"x", "application/octet-stream")}
        refused = [
            await gateway.client.post("/v1/functions", json={"path": str(state)}),
            await gateway.client.post("/replicate/v1/files", files=form),
        ]
        assert [response.status_code for response in refused] == [507, 507]
        assert all("is full" in response.text for response in refused)


async def test_the_metrics_tell_free_space_and_a_jobs_database_that_fails(state):
    async with gateway_here(state) as gateway:
        text = (await gateway.client.get("/metrics")).text
        assert "pilotflame_job_store_up 1.0" in text
        free = re.search(r"^pilotflame_state_free_bytes (\S+)$", text, re.MULTILINE)
        assert free is not None
        assert 0 < float(free[1]) <= shutil.disk_usage(state).total
        with contextlib.closing(sqlite3.connect(state / DATABASE_FILE)) as connection:
            connection.execute("DROP TABLE deliveries")
        text = (await gateway.client.get("/metrics")).text
        assert "pilotflame_job_store_up 0.0" in text
        assert "pilotflame_state_free_bytes" in text


async def test_draining_is_not_ready(state, gate: Gate):
    async with gateway_here(state) as gateway:
        source = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
        function = await gateway.deploy(source, gate=gate)
        running = asyncio.create_task(function.answer(1))
        await gate.next()
        assert gateway.server is not None
        gateway.server.admin.draining = True
        response = await gateway.client.get("/readyz")
        assert (response.status_code, response.json()) == (503, {"status": "draining"})
        assert "retry-after" in response.headers
        gate.open()
        assert await running == 1
