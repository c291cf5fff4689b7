"""Serves the protocol over gRPC, at the address that the gateway's setting `plugin_ports` has for this plugin.

Each call is admitted by its metadata before its message is read, so all methods are streams in this module: gRPC
reads the message of any other call first. On the wire, a stream with one message each way is the same as a plain call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

# No forked process uses gRPC. Without this setting, gRPC's fork handlers would print warnings at each fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc
from multidict import CIMultiDict

from ....errors import (
    BadInput,
    Cancelled,
    DeadlineExceeded,
    GatewayError,
    InputTimeout,
    InvocationError,
    Overloaded,
    PilotflameError,
)
from ...front.api.backend import Backend
from ...front.api.plugin import Entrance
from ...front.http.guard import Admitted
from ...front.http.incoming_bodies import INCOMING
from ...front.http.large_answers import MAX_BYTES
from ...front.http.parsed_bodies import PARSED_BODIES
from ...front.http.requests import BODY_TIMEOUT_S
from ...front.http.responses import MAX_ON_LOOP_BYTES, retry_headers
from ...front.listening.sockets import bind
from ...front.listening.tls import Certificate
from ...ground.access.fair_share import SharedRoom
from .errors import error_text
from .grpc_fields import check, is_small, read_message, unpacked
from .grpc_messages import message
from .grpc_methods import METHODS, GrpcCall, GrpcMethods, Method, Responses
from .grpc_port import GrpcConnection, GrpcPort
from .grpc_requests import is_final, read_request
from .repository import Repository

LOG = logging.getLogger(__name__)
SERVICE = "/inference.GRPCInferenceService/"
MOST_OPEN = 4096
"""The limit for open calls and streams. The owners of API keys share it."""
MOST_STREAMED = 32
"""The limit for the requests of one stream that run, or whose answers were not sent yet."""
FEW_FIELDS = 200
"""The event loop itself reads messages with at most this many fields and this many values in contents. Threads read the others."""
SOCKET = "run/oip.sock"
"""gRPC's unix socket in the state folder. Its path must not be longer than the path of the link socket, whose length is checked."""
IDLE_S = 600.0
"""A stream ends if its caller sends nothing for this long."""
STOP_S = 1.0
MOST_TEXT_BYTES = 1200
"""The most bytes of an error's text. gRPC sends it as a header, percent-encoded, and clients refuse long headers."""
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND, 408: grpc.StatusCode.DEADLINE_EXCEEDED, 413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT, 429: grpc.StatusCode.RESOURCE_EXHAUSTED, 499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
_INFER = METHODS["ModelInfer"]
UNREAD = DeadlineExceeded(
    "The caller did not read a response in time.", remedy="Read the responses as they arrive."
)


class GrpcServer(grpc.GenericRpcHandler):
    """The service at one address."""

    def __init__(self, backend: Backend, repository: Repository, entrance: Entrance) -> None:
        self._backend, self._entrance = backend, entrance
        self._methods = GrpcMethods(backend, repository, entrance)
        self._open, self._unread = SharedRoom(MOST_OPEN), SharedRoom(MAX_BYTES)
        self._port: GrpcPort

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serve inside the block. Raise GatewayError if the address cannot be used."""
        entrance, path = self._entrance, self._backend.state / SOCKET
        with contextlib.ExitStack() as stack:
            try:
                sock = stack.enter_context(bind(entrance.host, entrance.port))
            except GatewayError as error:
                fault = f"The plugin oip cannot listen at {entrance.host}:{entrance.port}: {error.message}"
                raise GatewayError(fault, remedy="Name another address in plugin_ports.") from None
            path.unlink(missing_ok=True)
            stack.callback(path.unlink, missing_ok=True)
            server = self._server(f"unix:{quote(str(path))}")
            await server.start()
            self._port = GrpcPort(sock, str(path), self._backend, entrance.app[INCOMING])
            try:
                yield
            finally:
                self._port.stop_accepting()
                await server.stop(STOP_S)
                self._port.close()

    def _server(self, address: str) -> grpc.aio.Server:
        """Return gRPC's server at the address of a unix socket."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._backend.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                # Do not let gRPC unpack messages: it checks the size of a message only after it has unpacked the message.
                ("grpc.per_message_decompression", 0),
            ]
        )
        server.add_generic_rpc_handlers((self,))
        if self._entrance.certificate is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(self._entrance.certificate))
        return server

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return gRPC's handler of a call, or None if the service has no such method."""
        name = handler_call_details.method.removeprefix(SERVICE)
        streams = name == "ModelStreamInfer"
        method = _INFER if streams else METHODS.get(name)
        if method is None:
            return None
        headers: CIMultiDict[str] = CIMultiDict(
            (key, value)
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        )
        answer = self._stream if streams else partial(self._one, method)
        return grpc.stream_stream_rpc_method_handler(
            partial(self._serve, method, headers, answer),
            response_serializer=lambda response: response.SerializeToString(),
        )

    async def _serve(
        self, method: Method, headers: CIMultiDict[str], answer: Callable[[GrpcCall, Admitted], Awaitable[None]], _: Any, context: Any,
    ) -> None:  # fmt: skip
        """Admit a call, and answer it. End it with the status of its error."""
        if (connection := self._port.find(context.peer())) is None:
            # The client's connection is closed, or the caller connected to gRPC's unix socket directly and not through the port.
            with contextlib.suppress(grpc.aio.InternalError):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "The connection is closed.")
            return
        with contextlib.ExitStack() as counts:
            counts.enter_context(connection.call())
            error = await self._failure(method, headers, answer, context, connection, counts)
            if error is not None and not context.done():
                context.set_trailing_metadata(
                    [(name.lower(), text) for name, text in retry_headers(error).items()]
                )
                text = error_text(error).encode()[:MOST_TEXT_BYTES].decode(errors="ignore")
                code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
                # gRPC keeps this frame until a garbage collection. Clear the error, so that the frame does not keep
                # the call's message in memory.
                error = None
                # gRPC sends the status only after a response that is being written. Until the caller has read that response or
                # has gone, gRPC keeps the response in memory, and this call counts.
                with contextlib.suppress(grpc.aio.InternalError):  # the caller has gone
                    await context.abort(code, text)

    async def _failure(
        self, method: Method, headers: CIMultiDict[str], answer: Callable[[GrpcCall, Admitted], Awaitable[None]], context: Any,
        connection: GrpcConnection, counts: contextlib.ExitStack,
    ) -> PilotflameError | None:  # fmt: skip
        """Answer a call. Return its error, or None. When `counts` is closed, the call is no longer counted."""
        try:
            admitted = await self._entrance.admit(headers, method.route, connection.transport)
            responses = Responses(context, self._unread, admitted.caller.owner)
            counts.callback(responses.close)
            call = GrpcCall(connection, headers, admitted.caller, context, responses)
            if method.route is None:
                await responses.write(await method.answer(self._methods, None, call))
                return None
            counts.enter_context(self._counted(call.caller.owner, admitted))
            connection.admit()
            await answer(call, admitted)
        except PilotflameError as error:
            return error
        except TimeoutError:
            return UNREAD
        except grpc.aio.InternalError:
            # The caller has gone, although `context.done()` may not be true yet.
            return Cancelled("The caller has gone.")
        except Exception:
            # Catch every exception, because gRPC would send its text to the caller.
            LOG.exception("a call with a %s failed", method.request)
            return InvocationError("The call failed.", remedy="The gateway's log has the reason.")
        else:
            # When the caller's key ends, a stream ends without an exception, even during a write. Then a response is unread.
            return UNREAD if responses.unread else None

    @contextlib.contextmanager
    def _counted(self, owner: str, admitted: Admitted) -> Iterator[None]:
        """Count an open call during the block. If its owner has too many open calls, raise Overloaded, and stop counting the
        request in the owner's quota.
        """
        if not self._open.takes(owner, 1):
            admitted.leave()
            raise Overloaded("Too many calls of this API key are open.", remedy="End some of them.")
        self._open.add(owner, 1)
        try:
            yield
        finally:
            self._open.remove(owner, 1)

    async def _one(self, method: Method, call: GrpcCall, admitted: Admitted) -> None:
        """Answer a call with one message."""
        try:
            try:
                sent = await _next(call, BODY_TIMEOUT_S)
            except TimeoutError:
                message = f"No message came within {BODY_TIMEOUT_S:.0f} s."
                raise InputTimeout(message) from None
            if sent is grpc.aio.EOF:
                raise BadInput("The call has no message.")
            request = await self._read(method.request, sent, call)
            await call.responses.write(await method.answer(self._methods, request, call))
        finally:
            admitted.leave()

    async def _stream(self, call: GrpcCall, admitted: Admitted) -> None:
        """Answer the requests of a stream, each as soon as it is done. Each request counts in the caller's quota, but the stream
        itself does not.

        The stream ends when the caller's key is revoked or expires, or when the gateway ends.
        """
        places = asyncio.Semaphore(MOST_STREAMED)
        first: Admitted | None = admitted
        try:
            # Send the metadata now. gRPC would send it with the first response, and send no status if that write were
            # cancelled.
            await call.context.send_initial_metadata(())
            async with self._backend.endless.limited(call.caller), asyncio.TaskGroup() as tasks:
                while (sent := await self._next_request(call)) is not grpc.aio.EOF:
                    await places.acquire()
                    given, first = first, None
                    tasks.create_task(self._answer(sent, call, given, places))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            if first is not None:
                first.leave()

    async def _read(self, kind: str, sent: bytes, call: GrpcCall) -> Any:
        """Return the request in a message. Raise BadInput if it is invalid, InputTooLarge if it is too long once it is
        unpacked, and Overloaded if too many bytes of the caller wait to be parsed.
        """
        if len(sent) <= MAX_ON_LOOP_BYTES and is_small(kind, sent, FEW_FIELDS):
            return _request(kind, sent)
        return await self._entrance.app[PARSED_BODIES].read(
            call.caller.owner, sent, partial(_checked_request, kind, self._backend.max_body_bytes)
        )

    async def _next_request(self, call: GrpcCall) -> Any:
        """Return the next request; EOF at the end of the stream, or if no request comes for IDLE_S. Raise Overloaded if too
        many bytes arrive.
        """
        try:
            return await _next(call, IDLE_S)
        except TimeoutError:
            return grpc.aio.EOF

    async def _answer(
        self, sent: bytes, call: GrpcCall, admitted: Admitted | None, places: asyncio.Semaphore
    ) -> None:
        """Answer one request of a stream. `admitted` is its admission, or None if it was not admitted yet."""
        request_id = ""

        async def write(response: Any, **fields: Any) -> None:
            # While the caller does not read, this waits, and then the function's stream waits, too. Limit the wait.
            streamed = message("ModelStreamInferResponse", infer_response=response, **fields)
            await call.responses.write(streamed, BODY_TIMEOUT_S)

        try:
            try:
                request = await self._read(_INFER.request, sent, call)
                request_id = request.id
                admitted = admitted or await self._entrance.admit(
                    call.headers, _INFER.route, call.connection.transport
                )
                last = await self._methods.stream(request, call, write)
            finally:
                if admitted is not None:
                    admitted.leave()
            if last is not None:
                await write(last)
        except PilotflameError as error:
            await write({"id": request_id, "parameters": is_final(True)}, error_message=error_text(error))
        finally:
            places.release()


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return credentials that change with the files of the gateway's certificate."""
    used = certificate.pem

    def renewed() -> Any:
        """Return the configuration if the certificate has changed, or None. gRPC calls this for each new connection, in a
        thread of its own.
        """
        nonlocal used
        if (found := certificate.pem) == used:
            return None
        used = found
        return _configuration(*found)

    return grpc.dynamic_ssl_server_credentials(_configuration(*used), renewed)


def _configuration(chain: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, chain)])


async def _next(call: GrpcCall, timeout_s: float) -> Any:
    """Return the next message of a call as bytes, or EOF. Raise TimeoutError, and Overloaded if too many bytes arrive."""
    return await call.connection.message(call.context.read, call.caller.owner, timeout_s)


def _checked_request(kind: str, most: int, sent: bytes) -> Any:
    """Return the request in a message, which may have at most `most` bytes once it is unpacked. Blocks: call it in a
    thread.
    """
    data = unpacked(sent, most)
    check(kind, data)
    return _request(kind, data)


def _request(kind: str, data: bytes) -> Any:
    """Return the request in the bytes of a message that `check` has accepted. Raise BadInput if protobuf refuses them."""
    return read_request(data) if kind == _INFER.request else read_message(kind, data)
