"""The messages of gRPC, without Triton's client. infra/versions.py runs this file with the oldest and newest grpcio and protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from oip_server import Server
from pilotflame.runtime.plugins.oip.grpc_messages import CLASSES, message, parameters_of

pytestmark = pytest.mark.asyncio(loop_scope="package")
SERVICE = "/inference.GRPCInferenceService"


def request(*numbers: int) -> Any:
    tensor = {"name": "n_int64", "datatype": "INT64", "shape": [1, len(numbers)]}
    return message(
        "ModelInferRequest", model_name="every", inputs=[{**tensor, "contents": {"int64_contents": numbers}}],
        parameters=[{"key": "off", "value": {"bool_param": False}}],
    )  # fmt: skip


async def test_a_false_parameter_is_there() -> None:
    sent = CLASSES["ModelInferRequest"].FromString(request(1).SerializeToString())
    assert parameters_of(sent.parameters) == {"off": False}


async def test_a_call(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(
            f"{SERVICE}/ModelInfer", lambda sent: sent.SerializeToString(), CLASSES["ModelInferResponse"].FromString
        )  # fmt: skip
        answer = await call(request(1, -(2**63)))
        assert answer.raw_output_contents[0] == (1).to_bytes(8, "little") + (-(2**63)).to_bytes(
            8, "little", signed=True
        )
        assert answer.model_version == "1"


async def test_a_stream(server: Server) -> None:
    async def requests() -> AsyncIterator[Any]:
        for number in range(3):
            yield request(number)

    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer", lambda sent: sent.SerializeToString(),
            CLASSES["ModelStreamInferResponse"].FromString,
        )  # fmt: skip
        found = [one.infer_response.raw_output_contents[0][0] async for one in call(requests())]
        assert sorted(found) == [0, 1, 2]
