"""Triton's Python clients, over HTTP and gRPC: every datatype, metadata, the repository, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oip_server import PASSING, Server
from pilotflame.handlers.tensors import DATATYPES
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="package")
SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, max_side=4)
CLIENTS = [(http_aio, "http"), (grpc_aio, "grpc")]


def numbers(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BYTES":
        texts = st.binary(max_size=6)
        return SHAPES.flatmap(lambda shape: arrays.arrays(object, shape, elements=texts, fill=st.nothing()))
    if datatype == "BF16":
        # The lower half of each float32 is zero, because the clients cut it off.
        bits = SHAPES.flatmap(lambda shape: arrays.arrays("<u2", shape))
        return bits.map(lambda array: (array.astype("<u4") << 16).view("<f4"))
    return SHAPES.flatmap(lambda shape: arrays.arrays(DATATYPES[datatype], shape))


def tensor(module: Any, name: str, datatype: str, array: Any) -> Any:
    found = module.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


def row(module: Any, *, count: int = 16) -> list[Any]:
    values = np.arange(count, dtype=np.int32).reshape(1, count)
    return [
        tensor(module, "INPUT0", "INT32", values),
        tensor(module, "INPUT1", "INT32", np.ones_like(values)),
    ]


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
@pytest.mark.parametrize("datatype", DATATYPES)
async def test_binary_round_trips(server: Server, module: Any, protocol: str, datatype: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:

        async def echoed(array: Any) -> None:
            sent = [tensor(module, f"n_{datatype.lower()}", datatype, array)]
            if datatype != "BYTES":
                sent.append(tensor(module, f"t_{datatype.lower()}", datatype, array.reshape(-1)))
            answer = await client.infer("every", sent)
            for one in sent:
                found = answer.as_numpy(one.name())
                assert found.dtype == array.dtype
                assert np.array_equal(found.reshape(array.shape), array, equal_nan=array.dtype.kind == "f")

        loop = asyncio.get_running_loop()

        @settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
        @given(array=numbers(datatype))
        def every(array: Any) -> None:
            asyncio.run_coroutine_threadsafe(echoed(array), loop).result(30)

        await asyncio.to_thread(every)


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_metadata_and_configuration(server: Server, module: Any, protocol: str) -> None:
    as_json = {"as_json": True} if protocol == "grpc" else {}
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("simple")
        found = await client.get_server_metadata(**as_json)
        assert "statistics" in found["extensions"]
        assert not [name for name in found["extensions"] if "shared_memory" in name]
        shown = await client.get_model_metadata("simple_string", **as_json)
        assert shown["name"] == "simple_string"
        assert [int(length) for length in shown["inputs"][0]["shape"]] == [-1, 16]
        config = await client.get_model_config("simple", **as_json)
        config = config.get("config", config)
        assert config["input"][1]["data_type"] == "TYPE_INT32"
        assert {model["name"] for model in await index(client, protocol)} >= {"simple", "every"}
        assert "plain" not in {model["name"] for model in await index(client, protocol)}


async def index(client: Any, protocol: str) -> list[dict[str, str]]:
    if protocol == "http":
        return list(await client.get_model_repository_index())
    return list((await client.get_model_repository_index(as_json=True))["models"])


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_an_unloaded_model_is_not_ready(server: Server, module: Any, protocol: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        await client.unload_model("simple_int8")
        assert not await client.is_model_ready("simple_int8")
        rows = {model["name"]: model for model in await index(client, protocol)}
        assert rows["simple-int8"]["state"] == "UNAVAILABLE"
        assert rows["simple-int8"]["reason"]
        await client.load_model("simple_int8")
        assert await client.is_model_ready("simple_int8")
        status = await server.gateway.client.get("/v1/functions/simple-int8")
        assert status.json()["workers"]["ready"] >= 1
        with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
            await client.load_model("nope")


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("nope", "Request for unknown model"),
        ("plain", "takes or returns no tensors"),
        ("streams", "doesn't support models with decoupled transaction policy"),
        ("simple_int8", "input.INPUT0: it is INT32, not INT8"),
        ("broken", "of the handler"),
        ("wrong", "answer.OUTPUT0"),
    ],
)
async def test_errors(server: Server, module: Any, protocol: str, model: str, wanted: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        sent = (
            [tensor(module, "INPUT0", "BYTES", np.array([[b"a"]], object))]
            if model in ("broken", "wrong")
            else row(module)
        )
        with pytest.raises(InferenceServerException) as found:
            await client.infer(model, sent)
        assert wanted in found.value.message()


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_what_is_not_supported_is_named(server: Server, module: Any, protocol: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        with pytest.raises(InferenceServerException, match="sequence_id is not supported"):
            await client.infer("simple", row(module), sequence_id=7)
        top = module.InferRequestedOutput("OUTPUT0", class_count=3)
        with pytest.raises(InferenceServerException, match="classification is not supported"):
            await client.infer("simple", row(module), outputs=[top])
        other = module.InferRequestedOutput("OUTPUT7")
        with pytest.raises(InferenceServerException, match="no output 'OUTPUT7'"):
            await client.infer("simple", row(module), outputs=[other])
        with pytest.raises(InferenceServerException, match="no live version '9'"):
            await client.infer("simple", row(module), model_version="9")


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_only_the_wanted_outputs_are_sent(server: Server, module: Any, protocol: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        wanted = [module.InferRequestedOutput("OUTPUT1")]
        answer = await client.infer(
            "simple", row(module), outputs=wanted, request_id="seven", model_version="1"
        )
        assert answer.as_numpy("OUTPUT0") is None
        assert answer.as_numpy("OUTPUT1").tolist() == [list(range(-1, 15))]
        response = answer.get_response()
        assert (response["id"] if protocol == "http" else response.id) == "seven"


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_parameters_reach_the_handler(server: Server, module: Any, protocol: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        sent = [tensor(module, "n_int8", "INT8", np.zeros((1, 1), np.int8))]
        await client.infer(
            "every", sent, parameters={"top": 5, "of": protocol}, priority=1, timeout=30_000_000
        )
        with pytest.raises(InferenceServerException):
            await client.infer("every", sent, timeout=-1)
    query = {"lines": 200}
    log = (await server.gateway.client.get("/v1/functions/every/logs", params=query)).text
    assert f"extra: {{'parameters': {{'top': 5, 'of': '{protocol}'}}}}" in log or (
        f"'of': '{protocol}'" in log and "'top': 5" in log
    )


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_calls_are_counted(server: Server, module: Any, protocol: str) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:

        async def count() -> int:
            as_json = {"as_json": True} if protocol == "grpc" else {}
            [found] = (await client.get_inference_statistics("simple", **as_json))["model_stats"]
            return int(found["inference_stats"]["success"].get("count", 0))

        before = await count()
        await client.infer("simple", row(module))
        assert await count() == before + 1


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_calls_with_other_ids_get_the_stored_answer_with_their_own_id(
    server: Server, module: Any, protocol: str
) -> None:
    function = await server.gateway.deploy(PASSING, {"response_cache.ttl_s": 600}, name=f"kept-{protocol}")
    sent = [tensor(module, "x", "FP32", np.array([1.5], np.float32))]
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        for number, request_id in enumerate(("a", "b", "", 'c"')):
            answer = await client.infer(
                function.name, sent, request_id=request_id, timeout=9_000_000 + number, priority=number
            )
            assert answer.as_numpy("x").tolist() == [1.5]
            response = answer.get_response()
            assert (response.get("id", "") if protocol == "http" else response.id) == request_id
        other = await client.infer(function.name, sent, request_id="a", parameters={"top": 5})
        assert other.as_numpy("x").tolist() == [1.5]
    # The handler may read the parameter `top`, so that request did not get the stored answer.
    assert (await function.status())["invocations"] == {"http": {"200": 2}}


async def test_a_stored_answer_in_json_has_the_id_of_its_call(server: Server) -> None:
    function = await server.gateway.deploy(PASSING, {"response_cache.ttl_s": 600}, name="kept-json")
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}]
    found = [
        await server.gateway.client.post(
            f"/v2/models/{function.name}/infer", json={"id": name, "inputs": inputs}
        )
        for name in "ab"
    ]
    assert [answer.json()["id"] for answer in found] == ["a", "b"]
    assert [answer.headers["Cache-Status"].partition("; ttl=")[0] for answer in found] == [
        "pilotflame; fwd=miss; stored",
        "pilotflame; hit",
    ]


async def test_compressed_bodies(server: Server) -> None:
    async with http_aio.InferenceServerClient(server.http) as client:
        for algorithm in ("gzip", "deflate"):
            answer = await client.infer(
                "simple", row(http_aio), request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )  # fmt: skip
            assert answer.as_numpy("OUTPUT0").tolist() == [list(range(1, 17))]


async def test_the_clients_that_block(server: Server) -> None:
    def calls() -> list[Any]:
        with http_client.InferenceServerClient(server.http) as http:
            first = http.infer("simple", row(http_client)).as_numpy("OUTPUT0")
        with grpc_client.InferenceServerClient(server.grpc) as grpc:
            second = grpc.infer("simple", row(grpc_client)).as_numpy("OUTPUT0")
        return [first.tolist(), second.tolist()]

    assert await asyncio.to_thread(calls) == [[list(range(1, 17))]] * 2


async def test_below_its_base_path(server: Server) -> None:
    async with http_aio.InferenceServerClient(f"{server.http}/oip") as client:
        assert (await client.infer("simple", row(http_aio))).as_numpy("OUTPUT0").shape == (1, 16)
