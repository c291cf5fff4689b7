"""Vertex AI's endpoints over REST, as its documentation calls them, and the contract of its containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live import Gateway, gateway_here
from pilotflame.errors import GatewayError

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENDPOINTS = "/vertex/v1/projects/my-project/locations/us-central1/endpoints"
ECHO = "def handler(event):\n    return {'got': event}\n"
SCALED = (
    "def handler(event, context):\n    return event * context.extra.get('parameters', {}).get('factor', 1)\n"
)
PICKY = "def handler(event):\n    return 6 // event\n"
TEXTS = "def handler(event):\n    return event[::-1]\n"


async def fails(gateway: Gateway, path: str, **how: Any) -> dict[str, Any]:
    """Return the fields of an error. Its code is the status."""
    response = await gateway.client.post(f"{ENDPOINTS}/{path}", **how)
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"code", "message", "status"}
    assert found["code"] == response.status_code
    return found


async def test_predictions(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(SCALED)
    body = {"instances": [1, 2, 3], "parameters": {"factor": 10}}
    response = await gateway.client.post(f"{ENDPOINTS}/{function.name}:predict", json=body)
    revision = (await function.status())["revision"]
    assert response.json() == {
        "predictions": [10, 20, 30], "deployedModelId": revision, "modelDisplayName": function.name, "modelVersionId": "1",
        "model": f"projects/my-project/locations/us-central1/models/{function.name}",
    }  # fmt: skip
    assert response.headers["X-Request-Id"]
    response = await gateway.client.post(f"{ENDPOINTS}/{function.name}:predict", json={"instances": [4]})
    assert response.json()["predictions"] == [4]


async def test_what_the_instances_share_counts_for_each(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(SCALED)
    body = {"instances": [1] * 70, "parameters": {"factor": 1, "text": "x" * (1 << 20)}}
    error = await fails(gateway, f"{function.name}:predict", json=body)
    assert (error["code"], "the 70 instances share" in error["message"].lower()) == (400, True), error


async def test_raw_predictions(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO)
    path = f"{ENDPOINTS}/{function.name}:rawPredict"
    response = await gateway.client.post(path, json={"input": [1]})
    assert response.json() == {"got": {"input": [1]}}
    assert response.headers["X-Vertex-AI-Endpoint-Id"] == function.name
    texts = await deploy(TEXTS)
    path = f"{ENDPOINTS}/{texts.name}:rawPredict"
    response = await gateway.client.post(path, content=b"\x00\x01", headers={"Content-Type": "image/jpeg"})
    assert response.content == b"\x01\x00"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ([1], "not a JSON object"),
        ({}, "instances"),
        ({"instances": []}, "instances"),
        ({"instances": {"a": 1}}, "instances"),
        ({"instances": [1], "labels": {}}, 'Unknown name "labels"'),
    ],
)
async def test_a_wrong_body(deploy: Any, gateway: Gateway, body: Any, fault: str) -> None:
    function = await deploy(ECHO, check=False)
    found = await fails(gateway, f"{function.name}:predict", json=body)
    assert (found["code"], found["status"]) == (400, "INVALID_ARGUMENT")
    assert fault in found["message"]


async def test_errors(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(PICKY)
    name = function.name
    found = await fails(gateway, f"{name}:predict", json={"instances": [1, 0]})
    assert (found["code"], found["status"]) == (500, "INTERNAL")
    assert found["message"].startswith("instances[1]: ")
    assert (await fails(gateway, "gone:predict", json={"instances": [1]}))["status"] == "NOT_FOUND"
    for verb in ("explain", "streamRawPredict", "directPredict", "serverStreamingPredict"):
        found = await fails(gateway, f"{name}:{verb}", json={})
        assert (found["code"], found["status"]) == (501, "UNIMPLEMENTED")
        assert verb in found["message"]
    assert (await fails(gateway, f"{name}:tune", json={}))["status"] == "NOT_FOUND"
    await gateway.client.post(f"/v1/functions/{name}/pause")
    assert (await fails(gateway, f"{name}:rawPredict", json=1))["status"] == "UNAVAILABLE"


async def test_a_container(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the routes of the container. Vertex AI gets them even if another platform has the same paths."""
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/ping")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predictions")
    async with gateway_here(state, bare_paths=True) as gateway:
        function = await gateway.deploy(SCALED, name="one")
        assert (await gateway.client.get("/ping")).status_code == 200
        body = {"instances": [1, 2], "parameters": {"factor": 2}}
        response = await gateway.client.post("/predictions", json=body)
        assert response.json() == {"predictions": [2, 4]}
        assert (await gateway.client.post("/predictions", json={"instance": 1})).status_code == 400
        await gateway.client.post(f"/v1/functions/{function.name}/pause")
        assert (await gateway.client.get("/ping")).status_code == 503


async def test_a_route_that_is_no_path_stops_the_start(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "predict")
    with pytest.raises(GatewayError, match="AIP_PREDICT_ROUTE is 'predict'"):
        async with gateway_here(state, bare_paths=True):
            pass


async def test_a_function_that_the_key_does_not_cover_does_not_exist(state: Path) -> None:
    async with gateway_here(state) as gateway, gateway.at_home() as admin:
        for name in ("mine", "secret"):
            await gateway.deploy(ECHO, name=name, check=False)
        key = {"name": "k", "scopes": ["invoke"], "functions": ["mine"]}
        made = (await admin.post("/v1/keys", json=key)).json()
        gateway.client.headers["Authorization"] = f"Bearer {made['key']}"
        response = await gateway.client.post(f"{ENDPOINTS}/mine:predict", json={"instances": [1]})
        assert response.json()["predictions"] == [{"got": 1}]
        for verb in ("predict", "rawPredict", "explain"):
            hidden, gone = [
                await fails(gateway, f"{name}:{verb}", json={"instances": [1]}) for name in ("secret", "gone")
            ]
            assert hidden["message"].replace("secret", "gone") == gone["message"]
            assert (hidden["code"], hidden["status"]) == (404, "NOT_FOUND")
