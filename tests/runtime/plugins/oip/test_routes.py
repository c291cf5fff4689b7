"""The protocol over HTTP: JSON, the forms of bodies, errors, and what keys may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from live import gateway_here, short_folder
from oip_server import PASSING, Server, key

pytestmark = pytest.mark.asyncio(loop_scope="package")
INFER = "/v2/models/simple/infer"
LENGTH = "Inference-Header-Content-Length"


def request(**changes: Any) -> dict[str, Any]:
    """Return a request whose inputs are 0 to 15 and sixteen ones, with other fields."""
    inputs = [
        {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))},
        {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [[1] * 16]},
    ]
    return {"inputs": inputs, **changes}


async def test_json(server: Server) -> None:
    answer = await server.gateway.client.post(INFER, json=request(id="7"))
    assert answer.json() == {
        "model_name": "simple", "model_version": "1", "id": "7",
        "outputs": [
            {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(1, 17))},
            {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": list(range(-1, 15))},
        ],
    }  # fmt: skip
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-cold-start"] in ("true", "false")
    assert LENGTH not in answer.headers


@pytest.mark.parametrize(
    ("value", "status"), [("[" * 300 + "]" * 300, 400), ("1" * 30, 200)], ids=["deep", "long"]
)
async def test_parameters_end_no_call_of_another(server: Server, value: str, status: int) -> None:
    """The parameters are in the head of a frame. An error during the dispatch would end the worker's link, and so the calls of others."""
    text = orjson.dumps(request()).decode()
    body = f'{text[:-1]},"parameters":{{"a":{value}}}}}'
    worker = (await server.gateway.client.post(INFER, json=request())).headers["X-Worker-Id"]
    answer = await server.gateway.client.post(
        INFER, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status, answer.text[:300]
    assert (await server.gateway.client.post(INFER, json=request())).headers["X-Worker-Id"] == worker


async def test_much_json(server: Server) -> None:
    rows = 4000
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [rows, 16], "data": list(range(16 * rows))}
        for name in ("INPUT0", "INPUT1")
    ]
    answer = await server.gateway.client.post(INFER, json={"inputs": inputs})
    assert answer.json()["outputs"][0]["data"] == [2 * number for number in range(16 * rows)]


async def test_some_outputs_as_bytes(server: Server) -> None:
    outputs = [{"name": "OUTPUT1"}, {"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    answer = await server.gateway.client.post(INFER, json=request(outputs=outputs))
    header = int(answer.headers[LENGTH])
    found = {one["name"]: one for one in orjson.loads(answer.content[:header])["outputs"]}
    assert found["OUTPUT0"]["parameters"] == {"binary_data_size": 64}
    assert found["OUTPUT1"]["data"] == list(range(-1, 15))
    assert np.frombuffer(answer.content[header:], "<i4").tolist() == list(range(1, 17))


async def test_a_body_that_is_one_input(server: Server) -> None:
    values = np.arange(6, dtype="<f4")
    await server.gateway.deploy(PASSING.replace("[-1]", "[-1, 3]"), name="raw")
    sent = {LENGTH: "0", "Content-Type": "application/octet-stream"}
    answer = await server.gateway.client.post("/v2/models/raw/infer", content=values.tobytes(), headers=sent)
    header = int(answer.headers[LENGTH])
    assert orjson.loads(answer.content[:header])["outputs"][0]["shape"] == [2, 3]
    assert answer.content[header:] == values.tobytes()
    odd = await server.gateway.client.post("/v2/models/raw/infer", content=b"12345", headers=sent)
    assert (odd.status_code, list(odd.json())) == (400, ["error"])
    two = await server.gateway.client.post(INFER, content=b"1234", headers=sent)
    assert "one input" in two.json()["error"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not JSON"),
        (b"[]", "dictionary"),
        (orjson.dumps({"model_name": 1}), "inputs"),
        (orjson.dumps(request(parameters={"timeout": "soon"})), "timeout"),
        (orjson.dumps(request(parameters={"binary_data_output": 1})), "binary_data_output"),
        (orjson.dumps(request(outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": 1}}])), "binary_data"),
        (orjson.dumps({"inputs": [{**request()["inputs"][0], "parameters": {"shared_memory_region": "a"}}]}),
         "shared_memory_region is not supported"),
        (orjson.dumps({"inputs": request()["inputs"][:1]}), "INPUT1"),
        (orjson.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [2, 16], "data": [1]}]}), "INPUT0"),
    ],
)  # fmt: skip
async def test_wrong_requests_are_named(server: Server, body: bytes, named: str) -> None:
    answer = await server.gateway.client.post(
        INFER, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert named in answer.json()["error"]


@pytest.mark.parametrize(
    "changes",
    [
        # KServe's client sends the first of these. MLServer's types send members that are null.
        {"model_name": "simple", "model_version": None}, {"id": None, "parameters": None, "outputs": None}, {"outputs": []},
        {"unknown": {"a": [1]}, "parameters": {}}, {"outputs": [{"name": "OUTPUT0", "parameters": None, "datatype": None, "shape": None}]},
        {"outputs": [{"name": "OUTPUT0", "parameters": {"content_type": None, "headers": None, "x": 1}}]},
        {"parameters": {"content_type": None, "headers": None, "timeout": None, "priority": None, "binary_data_output": None}},
        {"parameters": {"classification": None, "sequence_id": None}},
    ],
)  # fmt: skip
async def test_members_that_are_unknown_or_null_ask_for_nothing(
    server: Server, changes: dict[str, Any]
) -> None:
    answer = await server.gateway.client.post(INFER, json=request(**changes))
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["name"] == "OUTPUT0"


async def test_unknown_members_of_an_input_ask_for_nothing(server: Server) -> None:
    more: list[dict[str, Any]] = [
        {"parameters": None}, {"parameters": {"binary_data_size": None, "content_type": None, "headers": None, "x": 1}, "unknown": 1}
    ]  # fmt: skip
    inputs = [{**one, **fields} for one, fields in zip(request()["inputs"], more, strict=True)]
    answer = await server.gateway.client.post(INFER, json={"inputs": inputs})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("length", ["-1", "99999999", "x", "1.0", ""])
async def test_wrong_lengths_of_the_header(server: Server, length: str) -> None:
    answer = await server.gateway.client.post(INFER, content=b"{}", headers={LENGTH: length})
    assert answer.status_code == 400
    assert LENGTH.lower() in answer.json()["error"].lower()


@pytest.mark.parametrize(
    ("parameters", "named"), [([5], "parameters"), (5, "parameters"), ({"config": 5}, "config is no text")]
)
async def test_wrong_parameters_of_a_load_are_named(server: Server, parameters: Any, named: str) -> None:
    body = {"parameters": parameters}
    answer = await server.gateway.client.post("/v2/repository/models/simple/load", json=body)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert named in answer.json()["error"]


async def test_versions(server: Server) -> None:
    client = server.gateway.client
    live = (await client.get("/v1/functions/simple")).json()["revision"]
    for version in ("1", live):
        answer = await client.post(f"/v2/models/simple/versions/{version}/infer", json=request())
        assert answer.status_code == 200
        assert (await client.get(f"/v2/models/simple/versions/{version}/ready")).json()["ready"]
    missing = await client.get("/v2/models/simple/versions/2")
    assert missing.status_code == 404


async def test_an_unknown_path_below_a_model_has_the_form_of_errors(server: Server) -> None:
    answer = await server.gateway.client.get("/v2/models/simple/nothing")
    assert (answer.status_code, list(answer.json())) == (404, ["error"])
    others = await server.gateway.client.get("/v2/simple/status/none")
    assert list(others.json()) == ["error"]
    assert "type" in others.json()["error"]


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/health/started", "/v2/logging"])
async def test_an_unknown_path_below_the_protocol_has_a_text_as_error(server: Server, path: str) -> None:
    answer = await server.gateway.client.get(path)
    assert (answer.status_code, type(answer.json()["error"])) == (404, str)


async def test_the_counts_of_each_phase_are_those_of_the_calls(server: Server) -> None:
    """perf_analyzer divides by the counts of compute_input and compute_output, so they must count every call."""
    await server.gateway.client.post(INFER, json=request())
    answer = await server.gateway.client.get("/v2/models/simple/stats")
    found = answer.json()["model_stats"][0]["inference_stats"]
    counts = {
        found[phase]["count"]
        for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output")
    }
    assert len(counts) == 1
    assert counts.pop() > 0


async def test_the_function_takes_json_at_invoke_too(server: Server) -> None:
    body = {"INPUT0": [[2] * 16], "INPUT1": [[3] * 16]}
    answer = await server.gateway.client.post("/invoke/simple", json=body)
    assert answer.json() == {"OUTPUT0": [[5] * 16], "OUTPUT1": [[-1] * 16]}


async def test_a_key_reaches_its_functions_only() -> None:
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            for name in ("one-model", "another"):
                await gateway.deploy(PASSING, name=name)
            headers = {"Authorization": f"Bearer {await key(gateway, functions=['one-model'])}"}
            client = gateway.client
            assert (await client.get("/v2/health/ready")).status_code == 200
            assert (await client.get("/v2/models/one_model")).status_code == 401
            assert (await client.get("/v2/models/one_model", headers=headers)).status_code == 200
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}
            for name, status in (("one_model", 200), ("one-model", 200), ("another", 404)):
                answer = await client.post(f"/v2/models/{name}/infer", json=body, headers=headers)
                assert answer.status_code == status, answer.text
            hidden = await client.get("/v2/models/another", headers=headers)
            missing = await client.get("/v2/models/nothing1", headers=headers)
            assert hidden.text.replace("another", "nothing1") == missing.text
            listed = await client.post("/v2/repository/index", headers=headers)
            assert [row["name"] for row in listed.json()] == ["one-model"]
            counted = (await client.get("/v2/models/stats", headers=headers)).json()["model_stats"]
            assert [one["name"] for one in counted] == ["one-model"]
            for verb in ("load", "unload"):
                answer = await client.post(f"/v2/repository/models/one-model/{verb}", headers=headers)
                assert answer.status_code == 403
