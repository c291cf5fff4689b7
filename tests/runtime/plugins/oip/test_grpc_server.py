"""The protocol over gRPC: contents of every type, streams, deadlines, cancelled calls, keys, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from live import WAITS_ASYNC, Gate, free_port, gateway_here, home_client, short_folder, until
from oidc_issuer import AUDIENCE, Issuer
from oip_server import PASSING, Server, key
from pilotflame.errors import GatewayError, PilotflameError, PluginError
from pilotflame.runtime.front.listening import tls
from pilotflame.runtime.plugins.oip import grpc_server
from pilotflame.runtime.plugins.oip.errors import error_text
from pilotflame.runtime.plugins.oip.grpc_messages import CLASSES
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="package")


def request(model: str, name: str, datatype: str, shape: list[int], **fields: Any) -> Any:
    """Return a request with one input. `fields` has the fields of its contents, or `raw`."""
    found = service_pb2.ModelInferRequest(model_name=model)
    tensor = found.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in fields.items():
        if field == "raw":
            found.raw_input_contents.append(values)
        else:
            getattr(tensor.contents, field).extend(values)
    return found


def passing(value: float, model: str = "passing") -> Any:
    return request(model, "x", "FP32", [1], fp32_contents=[value])


def stub(address: str) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
    return channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]


async def test_the_messages_are_those_of_the_client() -> None:
    """Every field of ours has the number and the kind of the client's field of the same name."""
    for name, ours in CLASSES.items():
        theirs = getattr(service_pb2, name, None)
        if theirs is None:
            continue
        for field in ours.DESCRIPTOR.fields:
            other = theirs.DESCRIPTOR.fields_by_name[field.name]
            assert (field.number, field.is_repeated) == (other.number, other.is_repeated), (name, field.name)
            same = field.type == other.type or {field.type, other.type} == {5, 14}
            assert same, (name, field.name)


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]), ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 1]), ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]), ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]), ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]), ("FP32", "fp32_contents", [0.5, -1.5]),
        ("FP64", "fp64_contents", [0.1, -1e300]),
    ],
)  # fmt: skip
async def test_contents(server: Server, datatype: str, field: str, values: list[Any]) -> None:
    channel, calls = stub(server.grpc)
    async with channel:
        sent = request("every", f"n_{datatype.lower()}", datatype, [1, 2], **{field: values})
        answer = await calls.ModelInfer(sent)
        kind = {"BOOL": "?", "FP32": "<f4", "FP64": "<f8"}.get(datatype)
        kind = kind or f"<{'u' if datatype[0] == 'U' else 'i'}{int(datatype.lstrip('UINT')) // 8}"
        assert np.frombuffer(answer.raw_output_contents[0], kind).tolist() == values
        assert list(answer.outputs[0].shape) == [1, 2]


async def test_texts_in_contents(server: Server) -> None:
    channel, calls = stub(server.grpc)
    async with channel:
        sent = request("simple_identity", "INPUT0", "BYTES", [1, 2], bytes_contents=[b"a\xff", b""])
        answer = await calls.ModelInfer(sent)
        assert answer.raw_output_contents[0] == b"\x02\0\0\0a\xff\0\0\0\0"


@pytest.mark.parametrize(
    ("sent", "code", "named"),
    [
        (request("every", "n_int8", "INT8", [1, 1], int_contents=[128]), "INVALID_ARGUMENT", "n_int8"),
        (request("every", "n_fp16", "FP16", [1, 1]), "INVALID_ARGUMENT", "raw_input_contents"),
        (request("every", "n_int8", "INT8", [1, 2], raw=b"\0"), "INVALID_ARGUMENT", "n_int8"),
        (request("every", "n_int8", "INT8", [1, 1], raw=b"\0", int_contents=[1]), "INVALID_ARGUMENT", "beside"),
        (request("nope", "x", "INT8", [1]), "NOT_FOUND", "unknown model"),
        (request("broken", "INPUT0", "BYTES", [1, 1], bytes_contents=[b"a"]), "INTERNAL", "of the handler"),
    ],
    ids=["range", "no contents", "size", "both", "unknown", "handler"],
)  # fmt: skip
async def test_errors_have_a_code(server: Server, sent: Any, code: str, named: str) -> None:
    channel, calls = stub(server.grpc)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await calls.ModelInfer(sent)
        assert found.value.code().name == code
        assert named in (found.value.details() or "")


async def test_an_unknown_method_is_unimplemented(server: Server) -> None:
    channel, calls = stub(server.grpc)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await calls.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest())
        assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await call(b"\xff\xff\xff")
        assert found.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
        assert (await stub(server.grpc)[1].ServerLive(service_pb2.ServerLiveRequest())).live


async def test_a_stream_answers_every_request(server: Server) -> None:
    await server.gateway.deploy(PASSING, name="passing")
    channel, calls = stub(server.grpc)

    async def requests() -> AsyncIterator[Any]:
        for number in range(100):
            sent = passing(float(number)) if number != 50 else passing(0.0, "nope")
            sent.id = str(number)
            yield sent

    async with channel:
        found, failed = {}, []
        async for one in calls.ModelStreamInfer(requests()):
            response = one.infer_response
            if one.error_message:
                failed.append((response.id, one.error_message))
            else:
                found[response.id] = np.frombuffer(response.raw_output_contents[0], "<f4")[0]
    assert found == {str(number): float(number) for number in range(100) if number != 50}
    assert failed[0][0] == "50"
    assert "unknown model" in failed[0][1]


async def test_a_cancelled_call_and_a_deadline_end_the_handler(server: Server) -> None:
    source = PASSING.replace("def handler", "async def answer") + WAITS_ASYNC.replace(
        "handler(event)", "handler(event: X) -> X"
    )
    with short_folder() as folder:
        async with Gate(folder / "gate") as gate:
            await server.gateway.deploy(source, name="waiting", gate=gate)
            channel, calls = stub(server.grpc)
            async with channel:
                call = calls.ModelInfer(passing(1.0, "waiting"))
                waiting = asyncio.ensure_future(_ended(call))
                await gate.next("begun")
                call.cancel()
                await gate.next("cancelled")
                assert await waiting in (grpc.StatusCode.CANCELLED, None)
                call = calls.ModelInfer(passing(1.0, "waiting"), timeout=0.5)
                assert await _ended(call) is grpc.StatusCode.DEADLINE_EXCEEDED
                await gate.next("cancelled")


async def _ended(call: Any) -> grpc.StatusCode | None:
    """Return the status with which a call fails; None if it is cancelled here."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return None
    raise AssertionError("the call did not fail")


async def test_a_key_reaches_its_functions_only() -> None:
    with short_folder() as folder:
        address = f"127.0.0.1:{free_port()}"
        async with gateway_here(folder / "state", plugin_ports=(f"oip={address}",)) as gateway:
            for name in ("mine", "another"):
                await gateway.deploy(PASSING, name=name)
            token = await key(gateway, functions=["mine"])
            channel, calls = stub(address)
            metadata = (("authorization", f"Bearer {token}"),)
            async with channel:
                assert (await calls.ServerLive(service_pb2.ServerLiveRequest())).live
                assert await _ended(calls.ModelInfer(passing(1.0, "mine"))) is grpc.StatusCode.UNAUTHENTICATED
                answer = await calls.ModelInfer(passing(1.0, "mine"), metadata=metadata)
                assert answer.model_name == "mine"
                other = calls.ModelInfer(passing(1.0, "another"), metadata=metadata)
                assert await _ended(other) is grpc.StatusCode.NOT_FOUND
                rows = await calls.RepositoryIndex(service_pb2.RepositoryIndexRequest(), metadata=metadata)
                assert [row.name for row in rows.models] == ["mine"]
                unload = service_pb2.RepositoryModelUnloadRequest(model_name="mine")
                refused = calls.RepositoryModelUnload(unload, metadata=metadata)
                assert await _ended(refused) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_refused_caller_sends_no_message() -> None:
    with short_folder() as folder:
        address = f"127.0.0.1:{free_port()}"
        async with (
            gateway_here(folder / "state", plugin_ports=(f"oip={address}",), auth="always"),
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelInfer")()
            # The status arrives although the client has sent no message.
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_calls_that_send_nothing_stop_no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "BODY_TIMEOUT_S", 1.0)
    with short_folder() as folder:
        address = f"127.0.0.1:{free_port()}"
        async with gateway_here(folder / "state", plugin_ports=(f"oip={address}",)) as gateway:
            await gateway.deploy(PASSING, name="passing")
            silent, other = [(("authorization", f"Bearer {await key(gateway)}"),) for _ in range(2)]
            async with grpc.aio.insecure_channel(address) as channel:
                open_call = channel.stream_stream("/inference.GRPCInferenceService/ModelInfer")
                waiting = [open_call(metadata=silent) for _ in range(32)]
                calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                assert (await calls.ModelInfer(passing(1.0), metadata=other)).model_name == "passing"
                codes = {await call.code() for call in waiting}
                assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_each_request_of_a_stream_counts_in_the_quota_and_a_revoked_key_ends_it() -> None:
    with short_folder() as folder:
        address = f"127.0.0.1:{free_port()}"
        async with gateway_here(folder / "state", plugin_ports=(f"oip={address}",)) as gateway:
            await gateway.deploy(PASSING, name="passing")
            token = await key(gateway, rate_per_s=0.01, burst=2, concurrency=1)
            channel, calls = stub(address)
            async with channel:
                stream = calls.ModelStreamInfer(metadata=(("authorization", f"Bearer {token}"),))
                found = []
                for number in range(3):
                    await stream.write(passing(float(number)))
                    found.append((await stream.read()).error_message)
                assert found[:2] == ["", ""]
                assert "quota is used up" in found[2]
                async with home_client(gateway.state) as home:
                    [listed] = (await home.get("/v1/keys")).json()["keys"]
                    assert (await home.delete(f"/v1/keys/{listed['id']}")).status_code == 200
                assert await stream.read() is grpc.aio.EOF


async def test_a_stream_that_is_not_read_stops_taking_requests(server: Server) -> None:
    await server.gateway.deploy(PASSING, name="passing")
    channel, calls = stub(server.grpc)
    row = np.zeros(1 << 18, "<f4").tobytes()
    sent = request("passing", "x", "FP32", [1 << 18], raw=row)
    async with channel:
        stream, written = calls.ModelStreamInfer(), list[int]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                while len(written) < 400:
                    await stream.write(sent)
                    written.append(1)
        assert len(written) < 200
        stream.cancel()


ENDLESS = """
from collections.abc import Iterator
from typing import Annotated
import numpy
import pilotflame
from pydantic import BaseModel

class X(BaseModel):
    x: Annotated[numpy.ndarray, pilotflame.Tensor("FP32", [-1])]

def handler(event: X) -> Iterator[X]:
    while True:
        yield X(x=numpy.zeros(1 << 20, "f4"))
"""


async def begun_stream(calls: Any, requests: int, **fields: Any) -> Any:
    """Begin a stream with requests whose responses are not read."""
    stream = calls.ModelStreamInfer(**fields)
    for _ in range(requests):
        await stream.write(passing(1.0, "endless"))
    return stream


async def no_answers() -> bool:
    """Return True if no request of a stream is being answered in this process."""
    return not any("_answer" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def code_of_the_end(stream: Any) -> grpc.StatusCode:
    """Read the rest of a stream. Return its status."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await stream.read() is not grpc.aio.EOF:
            pass
    return await stream.code()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("timeout_s", "body_timeout_s", "reads"),
    [(3.0, 60.0, True), (60.0, 1.0, True), (60.0, 1.0, False)],
    ids=["deadline", "write", "gone"],
)
async def test_responses_that_are_not_read_end_and_count_until_the_caller_reads_or_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, timeout_s: float, body_timeout_s: float, reads: bool,
) -> None:  # fmt: skip
    # Beside a response of 4 MiB, 12 MiB are too many for the same owner, but not for another owner.
    monkeypatch.setattr(grpc_server, "MAX_BYTES", 35 << 19)
    monkeypatch.setattr(grpc_server, "BODY_TIMEOUT_S", body_timeout_s)
    with short_folder() as folder:
        address = f"127.0.0.1:{free_port()}"
        async with gateway_here(folder / "state", plugin_ports=(f"oip={address}",)) as gateway:
            await gateway.deploy(ENDLESS, {"concurrency": 4, "timeout_s": timeout_s}, name="endless")
            await gateway.deploy(PASSING, name="passing")
            lazy, other = [(("authorization", f"Bearer {await key(gateway)}"),) for _ in range(2)]
            row = np.zeros(3 << 20, "<f4").tobytes()
            large = request("passing", "x", "FP32", [3 << 20], raw=row)
            channel, calls = stub(address)
            async with channel:
                stream = await begun_stream(calls, 1, metadata=lazy)
                await stream.read()
                await until(no_answers, "the stream ends")
                # The call has run. Its status is not UNAVAILABLE, because clients repeat such calls.
                expected = [(lazy, grpc.StatusCode.INTERNAL), (other, grpc.StatusCode.OK)]
                for metadata, code in expected:
                    call = calls.ModelInfer(large, metadata=metadata)
                    assert await call.code() is code, await call.details()
                if reads:
                    assert await code_of_the_end(stream) is grpc.StatusCode.DEADLINE_EXCEEDED
                else:
                    stream.cancel()

                async def has_room() -> bool:
                    return await calls.ModelInfer(large, metadata=lazy).code() is grpc.StatusCode.OK

                await until(has_room, "the responses count no more")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("most", [4 << 20, -1], ids=["refuses", "cancels"])
async def test_a_caller_that_goes_during_a_write_is_no_error(
    server: Server, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    """The caller refuses a response that is longer than `most` bytes, or cancels the stream."""
    await server.gateway.deploy(ENDLESS, {"concurrency": 4}, name="endless")
    async with grpc.aio.insecure_channel(server.grpc, [("grpc.max_receive_message_length", most)]) as channel:
        calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(5):
            stream = await begun_stream(calls, 4)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stream.read()
            stream.cancel()
            await until(no_answers, "the stream ends")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_open_calls_without_a_key_stop_nobody(server: Server) -> None:
    await server.gateway.deploy(PASSING, name="passing")
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        open_call = channel.stream_stream("/inference.GRPCInferenceService/ServerLive")
        waiting = [open_call() for _ in range(100)]
        _, calls = stub(server.grpc)
        assert (await calls.ServerLive(service_pb2.ServerLiveRequest())).live
        assert (await calls.ModelInfer(passing(1.0))).model_name == "passing"
        assert all([await call.read() for call in waiting])
        assert {await call.code() for call in waiting} == {grpc.StatusCode.OK}


async def test_a_functions_limit_of_bodies_holds(server: Server) -> None:
    await server.gateway.deploy(PASSING, {"max_body_bytes": 1000}, name="small")
    channel, calls = stub(server.grpc)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await calls.ModelInfer(request("small", "x", "FP32", [500], raw=bytes(2000)))
        assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1000" in (found.value.details() or "")


async def test_a_deploy_key_with_one_place_loads_and_unloads_and_the_audit_log_says_so() -> None:
    with short_folder() as folder:
        address = f"127.0.0.1:{free_port()}"
        async with gateway_here(folder / "state", plugin_ports=(f"oip={address}",)) as gateway:
            await gateway.deploy(PASSING, name="passing")
            token = await key(gateway, scopes=["deploy", "invoke"], concurrency=1, policy={"kind": "trusted"})
            metadata = (("authorization", f"Bearer {token}"),)
            channel, calls = stub(address)
            async with channel:
                for name in ("Unload", "Load"):
                    sent = getattr(service_pb2, f"RepositoryModel{name}Request")(model_name="passing")
                    await getattr(calls, f"RepositoryModel{name}")(sent, metadata=metadata)
            async with home_client(gateway.state) as home:
                lines = (await home.get("/v1/logs/audit")).text
            assert lines.count('function=\\"passing\\" outcome=\\"200\\"') == 2, lines


async def test_a_long_error_reaches_the_client(server: Server) -> None:
    source = PASSING.replace("return event", 'raise ValueError("ü" * 9000)')
    await server.gateway.deploy(source, name="wordy")
    channel, calls = stub(server.grpc)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await calls.ModelInfer(passing(1.0, "wordy"))
        assert found.value.code() is grpc.StatusCode.INTERNAL
        assert "ü" in (found.value.details() or "")


def write_certificate(authority: trustme.CA, folder: Path) -> None:
    """Replace the files of a certificate, each by a rename."""
    made = authority.issue_cert("localhost")
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    for name, pem in (("chain.pem", chain), ("key.pem", made.private_key_pem.bytes())):
        fresh = folder / "fresh"
        fresh.write_bytes(pem)
        fresh.chmod(0o600)
        fresh.replace(folder / name)


async def is_live(port: int, authority: trustme.CA) -> bool:
    """Return True if a new connection accepts the certificate, which this authority must have signed."""
    trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    # This option makes a new connection. Without it, channels to the same address share one.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"localhost:{port}", trusted, options) as channel:
        calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            return bool((await calls.ServerLive(service_pb2.ServerLiveRequest())).live)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


async def test_a_renewed_certificate_is_shown_to_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    first, second, port = trustme.CA(), trustme.CA(), free_port()
    write_certificate(first, tmp_path)
    files = {"tls_cert": tmp_path / "chain.pem", "tls_key": tmp_path / "key.pem"}
    with short_folder() as folder:
        async with gateway_here(folder / "state", plugin_ports=(f"oip=127.0.0.1:{port}",), **files):
            assert await is_live(port, first)
            (tmp_path / "chain.pem").write_text("no certificate")
            assert await is_live(port, first)
            write_certificate(second, tmp_path)
            assert await is_live(port, second)
            assert not await is_live(port, first)


async def test_a_token_of_an_issuer_acts_as_its_key() -> None:
    async with Issuer() as issuer:
        with short_folder() as folder:
            address = f"127.0.0.1:{free_port()}"
            async with gateway_here(folder / "state", plugin_ports=(f"oip={address}",)) as gateway:
                await gateway.deploy(PASSING, name="mine")
                await gateway.deploy(PASSING, name="another")
                rule = {"url": issuer.url, "audience": AUDIENCE, "subject": "repo:me/*"}
                await key(gateway, functions=["mine"], issuer=rule)
                channel, calls = stub(address)
                metadata = (("authorization", f"Bearer {issuer.token()}"),)
                async with channel:
                    answer = await calls.ModelInfer(passing(1.0, "mine"), metadata=metadata)
                    assert answer.model_name == "mine"
                    other = calls.ModelInfer(passing(1.0, "another"), metadata=metadata)
                    assert await _ended(other) is grpc.StatusCode.NOT_FOUND
                    wrong = (("authorization", f"Bearer {issuer.token(sub='repo:you/app')}"),)
                    refused = calls.ModelInfer(passing(1.0, "mine"), metadata=wrong)
                    assert await _ended(refused) is grpc.StatusCode.UNAUTHENTICATED
                    brief = (("authorization", f"Bearer {issuer.token(exp=int(time.time()) + 2)}"),)
                    stream = calls.ModelStreamInfer(metadata=brief)
                    # Wait for the end of the stream, which comes when the token expires.
                    assert await stream.read() is grpc.aio.EOF


async def test_an_address_that_is_taken_stops_the_start(server: Server, tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match="cannot listen"):
        async with gateway_here(tmp_path / "state", plugin_ports=(f"oip={server.grpc}",)):
            pass


@pytest.mark.parametrize(("name", "fault"), [("runpod", "nothing but HTTP"), ("nothing", "not on")])
async def test_a_plugin_without_such_a_protocol_stops_the_start(
    tmp_path: Path, name: str, fault: str
) -> None:
    address = f"{name}=127.0.0.1:{free_port()}"
    with pytest.raises(PluginError, match=fault):
        async with gateway_here(tmp_path / "state", plugin_ports=(address,)):
            pass


async def test_a_refused_call_leaves_nothing_to_the_garbage_collection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC keeps the frame that ends a call until a garbage collection. If that frame kept the error of the call, the error's
    traceback would keep the message in memory.
    """
    errors: list[weakref.ref[PilotflameError]] = []

    def noted(error: PilotflameError) -> str:
        errors.append(weakref.ref(error))
        return error_text(error)

    monkeypatch.setattr(grpc_server, "error_text", noted)
    channel, calls = stub(server.grpc)
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await calls.ModelInfer(passing(1.0, "absent"))
        await channel.close()
        assert len(errors) == 3
        await until(
            lambda: asyncio.sleep(0, all(error() is None for error in errors)), "the end of the errors"
        )
    finally:
        gc.enable()
