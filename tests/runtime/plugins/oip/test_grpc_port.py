"""The port of gRPC: how many connections it takes, and how much may arrive on them."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc
import pytest
from grpc_frames import connection, unfinished_call
from live import LIMIT_S, free_port, gateway_here, short_folder, until
from oip_server import PASSING, key
from pilotflame.runtime.plugins.oip import grpc_port
from tritonclient.grpc import service_pb2, service_pb2_grpc

from .test_grpc_server import passing, stub

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_idle_connections_leave_places_for_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_port, "most_connections", lambda: 8 * grpc_port.SHARE)
    with short_folder() as folder, contextlib.ExitStack() as stack:
        port = free_port()
        async with gateway_here(folder / "state", plugin_ports=(f"oip=127.0.0.1:{port}",)) as gateway:
            await gateway.deploy(PASSING, name="passing")
            idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
            channel, calls = stub(f"127.0.0.1:{port}")
            async with channel:
                assert (await calls.ModelInfer(passing(1.0))).model_name == "passing"
                stream = calls.ModelStreamInfer()
                await stream.write(passing(2.0))
                await stream.read()

                async def few_are_open() -> bool:
                    return sum(is_open(one) for one in idle) <= 4

                await until(few_are_open, "the others are closed")
                for _ in range(8):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                # A connection with a call is not idle, so the gateway has not closed it for new connections.
                await stream.write(passing(3.0))
                assert (await stream.read()).error_message == ""
                stream.cancel()


def is_open(sock: socket.socket) -> bool:
    """Return True if the gateway has not closed a connection."""
    sock.setblocking(False)
    try:
        return bool(sock.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_unfinished_messages_of_one_caller_leave_room_for_others(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pilotflame.runtime.front.http.incoming_bodies.IncomingBodies.__init__.__defaults__", (256 << 10,)
    )
    with short_folder() as folder:
        port = free_port()
        async with (
            gateway_here(folder / "state", plugin_ports=(f"oip=127.0.0.1:{port}",)) as gateway,
            contextlib.AsyncExitStack() as stack,
        ):
            await gateway.deploy(PASSING, name="passing")
            tokens = [f"Bearer {await key(gateway)}" for _ in range(2)]
            greedy = [
                await unfinished(
                    stack, port, unfinished_call(method, [("authorization", tokens[0])], 60_000, 50_000)
                )
                for _ in range(8)
            ]
            ended = [asyncio.create_task(end_of(one)) for one in greedy]
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            # At least four of the eight calls have room, and the gateway ends only the others.
            assert sum(task.done() for task in ended) <= 4
            channel, calls = stub(f"127.0.0.1:{port}")
            async with channel:
                answer = await calls.ModelInfer(passing(1.0), metadata=(("authorization", tokens[1]),))
                assert answer.model_name == "passing"
            for task in ended:
                task.cancel()


async def unfinished(stack: contextlib.AsyncExitStack, port: int, call: bytes) -> asyncio.StreamReader:
    """Send a call on a new connection, and return the reader of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(connection() + call)
    return reader


async def end_of(reader: asyncio.StreamReader) -> None:
    """Return once a call has the status UNAVAILABLE, or its connection is closed."""
    seen = b""
    while b"grpc-status\x0214" not in seen and (part := await reader.read(1 << 16)):
        seen += part


async def test_only_the_gateway_connects_with_the_socket_of_grpc() -> None:
    with short_folder() as folder:
        async with gateway_here(folder / "state", plugin_ports=(f"oip=127.0.0.1:{free_port()}",)) as gateway:
            path = gateway.state / "run/oip.sock"
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                call = calls.ServerLive(service_pb2.ServerLiveRequest())
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not path.exists()
