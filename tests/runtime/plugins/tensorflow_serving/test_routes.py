"""TensorFlow Serving's routes: the examples of its documentation, versions, batches and errors."""

from __future__ import annotations

from typing import Any

import pytest
from live import Gate, Gateway, gateway_here
from pilotflame.runtime.front.api import plugin

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODELS = "/tensorflow-serving/v1/models"
HALF_PLUS_THREE = "def handler(event: float) -> float:\n    return event / 2 + 3\n"
NAMED = """
from pydantic import BaseModel

class Event(BaseModel):
    tag: str
    signal: list[list[int]]

def handler(event: Event) -> dict[str, int]:
    return {"total": sum(map(sum, event.signal)), "letters": len(event.tag)}
"""
ECHO = "def handler(event):\n    return event\n"
BATCH = """
import pilotflame

@pilotflame.batch(max_size=8)
def handler(events):
    return [len(events)] * len(events)
"""
LONG = "def handler(event):\n    return 'x' * event\n"
PICKY = "def handler(event):\n    return 6 // event\n"
PIECES = "def handler(event):\n    yield event\n    yield event + 1\n"


async def post(gateway: Gateway, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    response = await gateway.client.post(f"{MODELS}/{path}", json=body, headers=headers)
    return response.status_code, response.json()


async def test_the_published_examples(deploy: Any, gateway: Gateway) -> None:
    await deploy(HALF_PLUS_THREE, name="half-plus-three")
    found = await gateway.client.get(f"{MODELS}/half-plus-three")
    ok = {"error_code": "OK", "error_message": ""}
    assert found.json() == {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": ok}]}
    # As `curl -d` sends it.
    form = {"Content-Type": "application/x-www-form-urlencoded", "X-Request-Id": "curl-1"}
    path = f"{MODELS}/half-plus-three:predict"
    found = await gateway.client.post(path, content='{"instances": [1.0, 2.0, 5.0]}', headers=form)
    assert (found.status_code, found.json()) == (200, {"predictions": [3.5, 4.0, 5.5]})
    assert found.headers["X-Request-Id"] == "curl-1"
    unknown = {"error": "Servable not found for request: Latest(half)"}
    assert await post(gateway, "half:predict", {"instances": [1.0, 5.0]}) == (404, unknown)


async def test_columnar_inputs_are_one_call(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO)
    inputs = {"tag": ["foo", "bar"], "signal": [[1, 2], [3, 4]]}
    assert await post(gateway, f"{function.name}:predict", {"inputs": inputs}) == (200, {"outputs": inputs})
    assert await post(gateway, f"{function.name}:predict", {"inputs": 7}) == (200, {"outputs": 7})
    rows = [{"input": 1}, {"tag": "foo"}]
    assert await post(gateway, f"{function.name}:predict", {"instances": rows}) == (
        200,
        {"predictions": rows},
    )


async def test_the_instances_of_a_request_form_batches(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(BATCH, {"scale.max": 1})
    status, found = await post(gateway, f"{function.name}:predict", {"instances": list(range(24))})
    assert status == 200
    assert len(found["predictions"]) == 24
    assert max(found["predictions"]) == 8


async def test_the_pieces_of_a_stream_are_a_list(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(PIECES)
    assert await post(gateway, f"{function.name}:predict", {"instances": [1, 5]}) == (
        200,
        {"predictions": [[1, 2], [5, 6]]},
    )


async def test_the_outputs_of_a_request_have_a_limit_of_bytes(
    deploy: Any, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "MOST_OUTPUT_BYTES", 1000)
    function = await deploy(LONG)
    status, found = await post(gateway, f"{function.name}:predict", {"instances": [300] * 3})
    assert (status, len(found["predictions"])) == (200, 3)
    status, found = await post(gateway, f"{function.name}:predict", {"instances": [300] * 4})
    assert status == 500
    assert "more than 1000 bytes" in found["error"]


async def test_versions_and_labels(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO, {"aliases": ["stable"]})
    name, body = function.name, {"instances": [1]}
    for place in ("versions/1", "labels/stable"):
        assert await post(gateway, f"{name}/{place}:predict", body) == (200, {"predictions": [1]})
        assert (await gateway.client.get(f"{MODELS}/{name}/{place}")).status_code == 200
    for path in (f"{name}/versions/2:predict", f"{name}/versions/x:predict"):
        status, found = await post(gateway, path, body)
        assert (status, found["error"].split("(")[0]) == (404, "Servable not found for request: Specific")
    assert await post(gateway, f"{name}/labels/canary:predict", body) == (
        400,
        {"error": "Unrecognized servable version label: canary"},
    )


async def test_the_metadata_are_the_annotations(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(NAMED)
    found = (await gateway.client.get(f"{MODELS}/{function.name}/metadata")).json()
    assert found["model_spec"] == {"name": function.name, "signature_name": "", "version": "1"}
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    shape = {"dim": [], "unknown_rank": True}
    assert signature["inputs"] == {
        "tag": {"dtype": "DT_STRING", "tensor_shape": shape, "name": "tag"},
        "signal": {"dtype": "DT_INT64", "tensor_shape": shape, "name": "signal"},
    }
    assert [one["dtype"] for one in signature["outputs"].values()] == ["DT_INVALID"]
    body = {"signature_name": "serving_default", "instances": [{"tag": "foo", "signal": [[1, 2], [3]]}]}
    assert await post(gateway, f"{function.name}:predict", body) == (
        200,
        {"predictions": [{"total": 6, "letters": 3}]},
    )


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, "Missing 'inputs' or 'instances' key"),
        ({"instances": {"a": 1}}, "Expecting 'instances' to be a list"),
        ({"instances": []}, "No values in 'instances' array"),
        ({"instances": [1], "inputs": 1}, "expecting only one of 'inputs' or 'instances'"),
        ([1], "not a JSON object"),
        ({"signature_name": "other", "instances": [1]}, 'Serving signature name: "other" not found'),
        ({"signature_name": 1, "instances": [1]}, "'signature_name' key must be a string value"),
        ({"instances": [3, "x"]}, "instances[1]: "),
    ],
)
async def test_a_wrong_body(deploy: Any, gateway: Gateway, body: Any, fault: str) -> None:
    function = await deploy(HALF_PLUS_THREE, check=False)
    status, found = await post(gateway, f"{function.name}:predict", body)
    assert (status, list(found)) == (400, ["error"])
    assert fault in found["error"]


async def test_errors_of_the_function_name_the_instance(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(PICKY)
    status, found = await post(gateway, f"{function.name}:predict", {"instances": [1, 2, 0]})
    assert status == 500
    assert found["error"].startswith("instances[2]: ")
    assert "division" in found["error"]


async def test_the_id_of_an_error_is_that_of_its_call(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(PICKY)
    response = await gateway.client.post(f"{MODELS}/{function.name}:predict", json={"instances": [0]})
    assert (await function.logged(response.headers["X-Request-Id"]))["level"] == "error"


async def test_a_request_has_one_deadline_for_all_instances(
    deploy: Any, gateway: Gateway, gate: Gate
) -> None:
    source = "import gate\ndef handler(event):\n    gate.wait('begun')\n"
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    status, found = await post(
        gateway, f"{function.name}:predict", {"instances": [1, 2]}, **{"X-Request-Timeout": "0.5"}
    )
    assert status == 504
    assert list(found) == ["error"]
    gate.open()


async def test_what_does_not_exist_is_refused_in_the_same_form(deploy: Any, gateway: Gateway) -> None:
    function = await deploy(ECHO, check=False)
    for verb in ("classify", "regress"):
        status, found = await post(gateway, f"{function.name}:{verb}", {"examples": [{"x": 1.0}]})
        assert status == 501
        assert f"does not support {verb}" in found["error"]
    for path in (f"{function.name}:explain", f"{function.name}/versions/1:tune"):
        status, found = await post(gateway, path, {})
        assert status == 400
        assert found["error"].startswith("Malformed request: ")
    await gateway.client.post(f"/v1/functions/{function.name}/pause")
    [version] = (await gateway.client.get(f"{MODELS}/{function.name}")).json()["model_version_status"]
    assert (version["state"], version["status"]["error_code"]) == ("END", "UNAVAILABLE")
    status, found = await post(gateway, f"{function.name}:predict", {"instances": [1]})
    assert (status, list(found)) == (503, ["error"])


async def test_a_function_that_the_key_does_not_cover_does_not_exist(state: Any) -> None:
    async with gateway_here(state, bare_paths=True) as gateway, gateway.at_home() as admin:
        await gateway.deploy(ECHO, name="mine")
        await gateway.deploy(ECHO, name="secret", check=False)
        key = {"name": "k", "scopes": ["invoke"], "functions": ["mine"]}
        made = (await admin.post("/v1/keys", json=key)).json()
        gateway.client.headers["Authorization"] = f"Bearer {made['key']}"
        for base in ("/tensorflow-serving", ""):
            path = f"{base}/v1/models/NAME:predict"
            found = [
                await gateway.client.post(path.replace("NAME", name), json={"instances": [1]})
                for name in ("mine", "secret", "gone")
            ]
            assert [one.status_code for one in found] == [200, 404, 404]
            assert found[1].json()["error"].replace("secret", "gone") == found[2].json()["error"]
        assert (await gateway.client.get("/kserve/v1/models")).json() == {"models": ["mine"]}
        gateway.client.headers["Authorization"] = "Bearer wrong"
        status, found = await post(gateway, "mine:predict", {"instances": [1]})
        assert (status, list(found)) == (401, ["error"])
