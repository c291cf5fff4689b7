"""Messages of few bytes and very many fields: the gateway refuses them before protobuf makes an object of each field."""

from __future__ import annotations

import resource
from typing import Any

import grpc
import numpy as np
import pytest
from oip_server import PASSING, Server
from pilotflame.errors import BadInput
from pilotflame.runtime.plugins.oip.grpc_fields import MOST_FIELDS, MOST_VALUES, check
from pilotflame.runtime.plugins.oip.grpc_messages import CLASSES, message
from tritonclient.grpc import service_pb2

from .test_grpc_server import passing, request, stub

pytestmark = pytest.mark.asyncio(loop_scope="package")
INFER = "/inference.GRPCInferenceService/ModelInfer"
KIND = "ModelInferRequest"


async def refusal(server: Server, sent: bytes, **how: Any) -> tuple[str, str]:
    """Return the status and the text with which bytes are refused."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(INFER)(sent, **how)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await call
    return found.value.code().name, found.value.details() or ""


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages(server: Server, coding: grpc.Compression) -> None:
    await server.gateway.deploy(PASSING, name="passing")
    channel, calls = stub(server.grpc)
    async with channel:
        for size in (1, 1 << 16):
            sent = request("passing", "x", "FP32", [size], raw=np.ones(size, "<f4").tobytes())
            answer = await calls.ModelInfer(sent, compression=coding)
            assert np.frombuffer(answer.raw_output_contents[0], "<f4").sum() == size


async def test_a_compressed_message_is_unpacked_up_to_the_limit_only(server: Server) -> None:
    """Client and gateway share this process. The client copies 300 MB; a gateway that unpacked all of them would need 300 MB more."""
    large, before = bytes(300_000_000), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, text = await refusal(server, large, compression=grpc.Compression.Gzip)
    assert (code, "20971520" in text) == ("RESOURCE_EXHAUSTED", True), text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.mark.parametrize(
    "sent", [b"\x2a\0" * 5_000_000, b"\x3a\0" * 5_000_000, b"\x78\x01\x80\0" * 2_000_000], ids=["inputs", "raw", "unknown"]
)  # fmt: skip
async def test_millions_of_fields_are_refused(server: Server, sent: bytes) -> None:
    code, text = await refusal(server, sent)
    assert code == "INVALID_ARGUMENT", text
    live = stub(server.grpc)[1].ServerLive(service_pb2.ServerLiveRequest())
    assert (await live).live


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [{"name": "x"}] * (MOST_FIELDS // 2 + 1)},
        {"inputs": [{"parameters": [{"key": "a"}] * (MOST_FIELDS // 2)}]},
        {"inputs": [{"shape": [1] * (MOST_FIELDS + 1)}]},
        {"outputs": [{}] * (MOST_FIELDS + 1)},
        {"raw_input_contents": [b""] * (MOST_FIELDS + 1)},
    ],
)
async def test_a_message_with_too_many_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="fields"):
        check(KIND, message(KIND, **fields).SerializeToString())


@pytest.mark.parametrize(
    "contents",
    [
        {"bytes_contents": [b""] * (MOST_VALUES + 1)},
        {"int64_contents": [0] * (MOST_VALUES + 1)},
        {"bool_contents": [True] * (MOST_VALUES + 1)},
        {"fp32_contents": [0.0] * (MOST_VALUES + 1)},
    ],
)
async def test_contents_with_too_many_values(contents: dict[str, Any]) -> None:
    sent = service_pb2.ModelInferRequest(inputs=[{"contents": contents}]).SerializeToString()
    with pytest.raises(BadInput, match="values") as caught:
        check(KIND, sent)
    assert "raw_input_contents" in caught.value.remedy


async def test_numbers_count_as_values_and_not_as_bytes() -> None:
    sent = service_pb2.ModelInferRequest(
        inputs=[{"contents": {"int64_contents": [-1] * (MOST_VALUES // 4)}}]
    ).SerializeToString()
    assert len(sent) > MOST_VALUES
    check(KIND, sent)


@pytest.mark.parametrize(
    "sent", [b"\x2a", b"\x2a\xff", b"\x80" * 1_000_000, b"\x2f", b"\x2a\x05\x0a"], ids=range(5)
)
async def test_bytes_that_are_no_message(sent: bytes) -> None:
    with pytest.raises(BadInput, match="no ModelInferRequest"):
        check(KIND, sent)


async def test_every_kind_of_message_can_be_counted() -> None:
    for kind in CLASSES:
        check(kind, b"")
    check(KIND, passing(1.0).SerializeToString())
