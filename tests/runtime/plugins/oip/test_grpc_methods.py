"""Functions that yield tensors, by Triton's clients: several responses to one request of a gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from live import Gate, short_folder
from oip_server import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="package")
HEAD = """
from collections.abc import AsyncIterator, Iterator
from typing import Annotated
import numpy
import pilotflame
from pydantic import BaseModel

class Row(BaseModel):
    ROW: Annotated[numpy.ndarray, pilotflame.Tensor("UINT8", [-1])]

"""
# Yields a tensor for each value, and fails at the value 13.
COUNTS = f"""{HEAD}
def handler(event: Row) -> Iterator[Row]:
    for value in event.ROW:
        if value == 13:
            raise ValueError("thirteen")
        yield Row(ROW=numpy.array([value]))
"""
ENDLESS = f"""{HEAD}
import gate

async def handler(event: Row) -> AsyncIterator[Row]:
    try:
        while True:
            yield Row(ROW=numpy.zeros(1 << 20, "u1"))
            gate.say("yielded")
    finally:
        gate.say("ended")
"""


def row(values: list[int]) -> Any:
    found = grpc_client.InferInput("ROW", [len(values)], "UINT8")
    found.set_data_from_numpy(np.array(values, np.uint8))
    return found


def final(response: Any) -> bool:
    return bool(response.get_response().parameters["triton_final_response"].bool_param)


async def test_the_client_that_calls_back(server: Server) -> None:
    await server.gateway.deploy(COUNTS, name="counts")

    def called(**how: Any) -> list[Any]:
        found: queue.Queue[Any] = queue.Queue()
        with grpc_client.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: found.put(error or result))
            # 10 is a line feed, which also ends the content type at the beginning of a piece.
            client.async_stream_infer("counts", [row([9, 10, 0, 255])], request_id="7", **how)
            client.stop_stream()
        return list(found.queue)

    for empty in (False, True):
        results = await asyncio.to_thread(called, enable_empty_final_response=empty)
        assert {one.get_response().id for one in results} == {"7"}
        if empty:
            last = results.pop()
            assert final(last)
            assert not last.get_response().outputs
        assert [one.as_numpy("ROW").tolist() for one in results] == [[9], [10], [0], [255]]
        assert not any(map(final, results))


async def test_several_requests_of_a_stream_and_an_error_after_responses(server: Server) -> None:
    await server.gateway.deploy(COUNTS, name="counts")

    async def requests() -> Any:
        for number, values in enumerate(([1, 2, 3], [], [5, 13, 6])):
            yield {"model_name": "counts", "inputs": [row(values)], "request_id": str(number)}
        int8 = [grpc_aio.InferInput(name, [1, 16], "INT8") for name in ("INPUT0", "INPUT1")]
        for one in int8:
            one.set_data_from_numpy(np.ones((1, 16), np.int8))
        yield {"model_name": "simple_int8", "inputs": int8, "request_id": "plain"}

    found: dict[str, list[int]] = {}
    errors = []
    async with grpc_aio.InferenceServerClient(server.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                errors.append(str(error))
                continue
            name = result.get_response().id
            if name == "plain":
                assert final(result)
                assert result.as_numpy("OUTPUT0").tolist() == [[2] * 16]
            else:
                found.setdefault(name, []).append(int(result.as_numpy("ROW")[0]))
    assert found == {"0": [1, 2, 3], "2": [5]}
    assert len(errors) == 1
    assert "thirteen" in errors[0]


async def test_other_calls_are_refused_as_triton_does(server: Server) -> None:
    await server.gateway.deploy(COUNTS, name="counts")
    wanted = "doesn't support models with decoupled transaction policy"
    async with grpc_aio.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match=wanted) as found:
            await client.infer("counts", [row([1])])
        assert found.value.status() == "StatusCode.UNIMPLEMENTED"
        for name, decoupled in (("counts", True), ("simple", False)):
            config = (await client.get_model_config(name)).config
            assert config.model_transaction_policy.decoupled is decoupled
    async with http_aio.InferenceServerClient(server.http) as http:
        sent = http_aio.InferInput("ROW", [1], "UINT8")
        sent.set_data_from_numpy(np.array([1], np.uint8))
        with pytest.raises(InferenceServerException, match=wanted) as found:
            await http.infer("counts", [sent])
        assert found.value.status() == "501"
        assert (await http.get_model_config("counts"))["model_transaction_policy"] == {"decoupled": True}


async def test_a_call_at_invoke_gets_json(server: Server) -> None:
    function = await server.gateway.deploy(COUNTS, name="counts")
    answer = await function.call({"ROW": [1, 2]}, Accept="application/vnd.oip;binary=*, application/x-npy")
    assert '{"ROW":[1]}' in answer.text
    assert '{"ROW":[2]}' in answer.text


async def test_a_stream_that_is_not_read_stops_the_function_and_its_end_ends_it(server: Server) -> None:
    with short_folder() as folder:
        async with Gate(folder / "gate") as gate:
            await server.gateway.deploy(ENDLESS, name="endless", gate=gate)
            async with grpc.aio.insecure_channel(server.grpc) as channel:
                calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                stream = calls.ModelStreamInfer()
                request = service_pb2.ModelInferRequest(model_name="endless", raw_input_contents=[b"a"])
                request.inputs.add(name="ROW", datatype="UINT8", shape=[1])
                await stream.write(request)
                with contextlib.suppress(AssertionError):
                    while len(gate.arrived) < 100:
                        await gate.next("yielded", limit_s=1.5)
                assert 0 < len(gate.arrived) < 100
                stream.cancel()
                await gate.next("ended")
