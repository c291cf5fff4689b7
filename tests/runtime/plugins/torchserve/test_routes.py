"""TorchServe's routes: the requests of its documentation, its handlers behind them, and errors in its form."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from live import Gate, Gateway, gateway_here, until
from pilotflame.runtime.plugins.torchserve.routes import SECRET_HEADERS

pytestmark = pytest.mark.asyncio(loop_scope="module")
BASE = "/torchserve"
ECHO = "def handler(event):\n    return {'got': event}\n"
HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Sizes(BaseHandler):
    def initialize(self, context):
        self.size = context.system_properties["batch_size"]

    def handle(self, data, context):
        answers = []
        for number, one in enumerate(data):
            file = one.get("data") or one.get("body")
            if file == "missing":
                context.set_response_status(404, "no such file", number)
            kind = type(file).__name__
            answers.append(file if isinstance(file, str) else {"type": kind, "size": len(file), "batch": len(data)})
        return answers
"""


async def fails(gateway: Gateway, method: str, path: str, **how: Any) -> tuple[int, str, str]:
    """Return the fields of an error. Its code is the status."""
    response = await gateway.client.request(method, f"{BASE}{path}", **how)
    found = response.json()
    assert set(found) == {"code", "type", "message"}
    assert found["code"] == response.status_code
    return found["code"], found["type"], found["message"]


async def test_the_published_requests(gateway: Gateway) -> None:
    files = {"handler.py": HANDLER, "model-config.yaml": "batchSize: 8\n"}
    assert (await gateway.send(None, files=files, name="kitten")).status_code == 201
    assert (await gateway.client.get(f"{BASE}/ping")).json() == {"status": "Healthy"}
    path = f"{BASE}/predictions/kitten"
    # As `curl -T FILE` and `curl -F data=@FILE` send a file.
    found = await gateway.client.put(path, content=b"\xff\xd8jpeg")
    assert found.json() == {"type": "bytearray", "size": 6, "batch": 1}
    found = await gateway.client.post(path, files={"data": ("kitten.jpg", b"\xff\xd8", "image/jpeg")})
    assert found.json()["size"] == 2
    found = await gateway.client.post(f"{path}/1", json=[1, 2, 3])
    assert found.json() == {"type": "list", "size": 3, "batch": 1}
    # As `curl -d` sends JSON.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    found = await gateway.client.post(path, content=b"[1, 2]", headers=form)
    assert found.json() == {"type": "list", "size": 2, "batch": 1}
    found = await gateway.client.post(path, content="text", headers={"Content-Type": "text/plain"})
    assert (found.text, found.headers["Content-Type"]) == ("text", "text/plain; charset=utf-8")
    assert found.headers["X-Request-Id"]
    code, kind, message = await fails(gateway, "POST", "/predictions/kitten", json="missing")
    assert (code, kind, message) == (404, "InternalServerException", "no such file")
    await gateway.client.delete("/v1/functions/kitten")


async def test_an_output_that_is_no_json_is_an_error_of_the_function(gateway: Gateway) -> None:
    source = """
from pilotflame.handlers.codec import OutputCodec
OutputCodec.encode = lambda self, answer, accept="": (b'"broken', "application/json")

def handler(event):
    return event
"""
    function = await gateway.deploy(source)
    code, _, message = await fails(gateway, "POST", f"/predictions/{function.name}", json=1)
    assert (code, "not JSON" in message) == (503, True), message


async def test_requests_form_batches_and_fail_alone(gateway: Gateway, gate: Gate) -> None:
    source = f"import gate\n{HANDLER}".replace("answers = []", "answers = []\n        gate.wait('begun')")
    files = {"handler.py": source, "model-config.yaml": "batchSize: 8\n"}
    deployed = await gateway.send(None, {"scale.max": 1}, files=files, name="batches", gate=gate, check=False)
    assert deployed.status_code == 201, deployed.text
    function, path = gateway.function("batches"), f"{BASE}/predictions/batches"

    async def queued() -> bool:
        return bool((await function.status())["queued"] == 8)

    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.client.post(path, json=[1]))
        await gate.next("begun")
        others = [group.create_task(gateway.client.post(path, json=body)) for body in ("missing", *[[1]] * 7)]
        await until(queued, "a queue")
        gate.open()
    assert first.result().json()["batch"] == 1
    assert [one.result().status_code for one in others] == [404, *[200] * 7]
    assert {one.result().json()["batch"] for one in others[1:]} == {8}
    await gateway.client.delete("/v1/functions/batches")


async def test_any_function_answers(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO)
    found = await gateway.client.post(f"{BASE}/predictions/{function.name}", json={"input": 1})
    assert found.json() == {"got": {"input": 1}}


async def test_models(deploy: Any, gateway: Gateway) -> None:
    function, other = await deploy(ECHO, {"scale.max": 2}), await deploy(ECHO, check=False)
    listed = (await gateway.client.get(f"{BASE}/models", params={"limit": "1"})).json()
    assert listed["models"][0]["modelName"] == listed["nextPageToken"]
    rest = await gateway.client.get(f"{BASE}/models", params={"next_page_token": listed["nextPageToken"]})
    names = [one["modelName"] for one in listed["models"] + rest.json()["models"]]
    assert {function.name, other.name} <= set(names)
    path = f"{BASE}/models/{function.name}"
    response = await gateway.client.put(path, params={"min_worker": "2", "synchronous": "true"})
    assert (response.status_code, response.json()) == (
        200, {"status": f"Workers scaled to 2 for model: {function.name}"},
    )  # fmt: skip
    response = await gateway.client.put(path, params={"min_worker": "1"})
    assert (response.status_code, response.json()) == (202, {"status": "Processing worker updates..."})
    for place in ("", "/1", "/all"):
        [model] = (await gateway.client.get(f"{path}{place}")).json()
        assert (model["modelName"], model["modelVersion"], model["maxWorkers"]) == (function.name, "1", 2)
        assert [one["status"] for one in model["workers"]].count("READY") == 2


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("max_worker=9", "max_worker"), ("timeout=5", "timeout"), ("min_worker=9", "min_worker is 9"), ("min_worker=x", "min_worker"),
        ("gpu=1", "'gpu'"),
    ],
)  # fmt: skip
async def test_scaling_that_pilotflame_does_not_have(
    deploy: Any, gateway: Gateway, query: str, fault: str
) -> None:
    function = await deploy(ECHO, {"scale.max": 2}, check=False)
    code, kind, message = await fails(gateway, "PUT", f"/models/{function.name}?{query}")
    assert (code, kind) == (400, "BadRequestException")
    assert fault in message


async def test_errors(deploy: Any, gateway: Gateway) -> None:
    function = await deploy("def handler(event):\n    raise ValueError('no good')\n")
    name = function.name
    assert await fails(gateway, "POST", "/predictions/gone", json=1) == (
        404, "ModelNotFoundException", "Model not found: gone",
    )  # fmt: skip
    assert await fails(gateway, "POST", f"/predictions/{name}/7", json=1) == (
        404, "ModelVersionNotFoundException", f"Model version: 7 does not exist for model: {name}",
    )  # fmt: skip
    code, kind, message = await fails(gateway, "POST", f"/predictions/{name}", json=1)
    assert (code, kind) == (503, "InternalServerException")
    assert "no good" in message
    json_type = {"Content-Type": "application/json"}
    found = await fails(gateway, "POST", f"/predictions/{name}", content=b"{", headers=json_type)
    assert found[:2] == (400, "BadRequestException")
    assert (await fails(gateway, "GET", "/predictions/a/b/c"))[:2] == (404, "ResourceNotFoundException")
    for method, path in (("POST", "/models"), ("DELETE", f"/models/{name}"), ("PUT", f"/models/{name}/1/set-default"),
                         ("POST", f"/explanations/{name}"), ("PATCH", f"/models/{name}")):  # fmt: skip
        assert (await fails(gateway, method, path))[:2] == (405, "MethodNotAllowedException"), path
    await gateway.client.post(f"/v1/functions/{name}/pause")
    assert (await fails(gateway, "POST", f"/predictions/{name}", json=1))[:2] == (
        503,
        "ServiceUnavailableException",
    )


SHOWS_HEADERS = (
    "def handle(data, context):\n    if data:\n        return [sorted(context.get_all_request_header(0))]\n"
)


async def test_the_keys_of_a_request_do_not_reach_the_handler(state: Path) -> None:
    async with gateway_here(state, auth="always") as gateway, gateway.at_home() as home:
        path, control = f"{BASE}/predictions/shows", "X-Pilotflame-Control-Key"
        gateway.client.headers[control] = home.headers[control]
        made = (await home.post("/v1/keys", json={"name": "k", "scopes": ["invoke"]})).json()
        folder = state.parent / "shows"
        folder.mkdir()
        (folder / "model_handler.py").write_text(SHOWS_HEADERS)
        order = {"path": str(folder), "overrides": {"name": "shows"}}
        assert (await home.post("/v1/functions", json=order)).status_code == 201
        signed = {"Authorization": "AWS4-HMAC-SHA256 x", "X-Amz-Security-Token": made["key"]}
        for key in ({"Authorization": f"Bearer {made['key']}"}, signed):
            found = (
                await gateway.client.post(path, json=1, headers={**key, "X-Api-Key": "k", "X-Mine": "1"})
            ).json()
            assert "x-mine" in found
            assert not {*SECRET_HEADERS, "x-amz-security-token", "x-pilotflame-control-key"} & set(found)


async def test_a_function_that_the_key_does_not_cover_does_not_exist(state: Path) -> None:
    async with gateway_here(state, bare_paths=True) as gateway, gateway.at_home() as admin:
        assert (await gateway.client.get("/ping")).status_code == 404
        await gateway.deploy(ECHO, name="mine")
        assert (await gateway.client.get("/ping")).json() == {"status": "Healthy"}
        await gateway.deploy(ECHO, name="secret", check=False)
        key = {"name": "k", "scopes": ["invoke"], "functions": ["mine"]}
        made = (await admin.post("/v1/keys", json=key)).json()
        gateway.client.headers["Authorization"] = f"Bearer {made['key']}"
        assert (await gateway.client.post("/predictions/mine", json=1)).json() == {"got": 1}
        for path in ("/predictions/NAME", "/models/NAME"):
            method = "POST" if path.startswith("/p") else "GET"
            hidden, gone = [
                await fails(gateway, method, path.replace("NAME", name)) for name in ("secret", "gone")
            ]
            assert hidden == (404, "ModelNotFoundException", "Model not found: secret")
            assert gone[:2] == hidden[:2]
        listed = (await gateway.client.get(f"{BASE}/models")).json()
        assert [one["modelName"] for one in listed["models"]] == ["mine"]
