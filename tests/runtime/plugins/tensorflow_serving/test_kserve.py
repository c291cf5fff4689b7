"""The first version of KServe's protocol: the requests that the `InferenceRESTClient` of its Python package sends, and errors.

The package itself cannot be installed beside pilotflame: it needs psutil below 6.
"""

from __future__ import annotations

from typing import Any

import pytest
from live import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
ECHO = "def handler(event):\n    return {'got': event}\n"


async def test_what_the_client_asks(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO)
    for base in ("/kserve", "/kserve/"):
        assert (await gateway.client.get(base)).json() == {"status": "alive"}
    listed = await gateway.client.get("/kserve/v1/models")
    assert function.name in listed.json()["models"]
    path = f"/kserve/v1/models/{function.name}"
    assert (await gateway.client.get(path)).json() == {"name": function.name, "ready": True}
    rows = [[6.8, 2.8], [6.0, 3.4]]
    for key in ("instances", "inputs"):
        found = await gateway.client.post(f"{path}:predict", json={key: rows})
        assert found.json() == {"predictions": [{"got": row} for row in rows]}
        assert found.headers["X-Request-Id"]
    await gateway.client.post(f"/v1/functions/{function.name}/pause")
    found = await gateway.client.get(path)
    assert found.status_code == 503
    assert found.json()["error"].startswith(f"Model with name {function.name} is not ready.")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ([1], "not a JSON object"),
        ({}, 'Expected one of "instances" and "inputs"'),
        ({"inputs": {"a": 1}}, 'Expected "inputs" to be a list'),
        ({"instances": 1}, 'Expected "instances" to be a list'),
        ({"instances": [1], "inputs": [1]}, 'Expected one of "instances" and "inputs"'),
        ({"instances": [1], "parameters": {"k": 1}}, "does not support the key 'parameters'"),
    ],
)
async def test_a_wrong_body(deploy: Any, gateway: Gateway, body: Any, fault: str) -> None:
    function = await deploy(ECHO, check=False)
    found = await gateway.client.post(f"/kserve/v1/models/{function.name}:predict", json=body)
    assert (found.status_code, list(found.json())) == (400, ["error"])
    assert fault in found.json()["error"]


async def test_unknown_models_and_explanations(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO, check=False)
    found = await gateway.client.post("/kserve/v1/models/gone:predict", json={"instances": [1]})
    assert (found.status_code, found.json()) == (404, {"error": "Model with name gone does not exist."})
    found = await gateway.client.post(f"/kserve/v1/models/{function.name}:explain", json={"instances": [1]})
    assert found.status_code == 501
    assert "does not support explain" in found.json()["error"]
