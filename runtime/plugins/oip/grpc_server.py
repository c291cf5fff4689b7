"""Serves the protocol over gRPC, at the address that the gateway's setting `plugin_ports` has for this plugin.

Each call is admitted by its metadata before its message is read, so all methods are streams here. On the wire, a call
with one message each way is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

# The gateway forks no process that goes on to use gRPC, whose handlers at each fork would only print warnings.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc
from google.protobuf.message import Message
from multidict import CIMultiDict

from ....errors import BadInput, GatewayError, InputTimeout, InvocationError, PilotflameError
from ...access.keys import Caller
from ...api.backend import Backend
from ...api.plugin import Entrance
from ...http.requests import TIMEOUT, request_id_of
from ...http.responses import invocation_headers, retry_headers
from .errors import error_text
from .grpc_messages import CLASSES, message, parameters_of
from .grpc_requests import infer_request, infer_response
from .infer_call import InferCall
from .model import TensorModel, function_of, server_metadata
from .repository import Repository

LOG = logging.getLogger(__name__)
SERVICE = "/inference.GRPCInferenceService/"
MOST_CALLS = 1024
"""The most calls at a time. gRPC refuses further calls."""
MOST_STREAMED = 32
"""The most requests of one stream that run at the same time."""
MOST_ARRIVING = 16
"""The most calls of one API key whose messages arrive at the same time. gRPC holds an arriving message in memory."""
STOP_S = 1.0
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND, 408: grpc.StatusCode.DEADLINE_EXCEEDED, 413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT, 429: grpc.StatusCode.RESOURCE_EXHAUSTED, 499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
_DATA_TYPES = {
    name: number
    for number, name in enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING", "BF16"),
        start=1,
    )
}  # fmt: skip
_MODEL_ROUTE = "/v2/models/{model}"


class GrpcCall(NamedTuple):
    """An admitted call: its headers, its caller, and gRPC's context."""

    headers: CIMultiDict[str]
    caller: Caller
    context: grpc.aio.ServicerContext[Any, Any]


class Method(NamedTuple):
    """A method of the service."""

    request: str
    route: tuple[str, str] | None
    """The HTTP route with the same meaning, whose scope the caller needs; None: it needs no key."""
    answer: Callable[[GrpcServer, Any, GrpcCall], Awaitable[Message]]


class GrpcServer(grpc.GenericRpcHandler):
    """The service at one address."""

    def __init__(self, backend: Backend, repository: Repository, entrance: Entrance) -> None:
        self._backend, self._repository, self._entrance = backend, repository, entrance
        self._arriving: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MOST_ARRIVING)
        )

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serve inside the block. Raise GatewayError if the address cannot be used."""
        most = self._backend.max_body_bytes
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", -1),
                # Without this, two gateways could share the port without an error.
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=MOST_CALLS,
        )  # fmt: skip
        server.add_generic_rpc_handlers((self,))
        address = f"{self._entrance.host}:{self._entrance.port}"
        try:
            if self._entrance.certificate is None:
                server.add_insecure_port(address)
            else:
                chain, key = (path.read_bytes() for path in self._entrance.certificate)
                server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
        except (RuntimeError, OSError) as error:
            fault = f"The plugin oip cannot listen at {address}: {error}."
            raise GatewayError(fault, remedy="Name another address in plugin_ports.") from None
        await server.start()
        try:
            yield
        finally:
            await server.stop(STOP_S)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return gRPC's handler of a call, or None if the service has no such method."""
        name = handler_call_details.method.removeprefix(SERVICE)
        streams = name == "ModelStreamInfer"
        method = METHODS.get("ModelInfer" if streams else name)
        if method is None:
            return None
        headers: CIMultiDict[str] = CIMultiDict(
            (key, value)
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        )
        return grpc.stream_stream_rpc_method_handler(
            partial(self._serve, method, headers, self._stream if streams else partial(self._one, method)),
            request_deserializer=CLASSES[method.request].FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    async def _serve(
        self, method: Method, headers: CIMultiDict[str], answer: Callable[[GrpcCall], Awaitable[None]], _: Any, context: Any,
    ) -> None:  # fmt: skip
        """Admit a call, and answer it. End it with the status of its error."""
        error = await self._failure(method, headers, answer, context)
        if error is not None:
            context.set_trailing_metadata(
                [(name.lower(), text) for name, text in retry_headers(error).items()]
            )
            await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error_text(error))

    async def _failure(
        self, method: Method, headers: CIMultiDict[str], answer: Callable[[GrpcCall], Awaitable[None]], context: Any,
    ) -> PilotflameError | None:  # fmt: skip
        try:
            admitted = self._entrance.admit(headers, method.route)
            try:
                await answer(GrpcCall(headers, admitted.caller, context))
            finally:
                admitted.leave()
        except PilotflameError as error:
            return error
        except Exception:
            # gRPC would send the text of the exception.
            LOG.exception("a call with a %s failed", method.request)
            return InvocationError("The call failed.", remedy="The gateway's log has the reason.")
        return None

    async def _one(self, method: Method, call: GrpcCall) -> None:
        if (request := await self._read(call)) is None:
            raise BadInput("The call has no message.")
        await call.context.write(await method.answer(self, request, call))

    async def _read(self, call: GrpcCall) -> Any:
        """Return the next message, or None at the end. Raise InputTimeout."""
        try:
            async with asyncio.timeout(self._backend.body_timeout_s), self._arriving[call.caller.owner]:
                found = await call.context.read()
        except TimeoutError:
            raise InputTimeout(f"No message came within {self._backend.body_timeout_s:.0f} s.") from None
        return None if found is grpc.aio.EOF else found

    # -- inference

    async def infer(self, sent: Any, call: GrpcCall) -> Message:
        """Return the response to a ModelInferRequest. Raise the errors of the call."""
        received_s, request_id = time.monotonic(), request_id_of(call.headers)
        model = self._repository.models.find(sent.model_name, call.caller.check)
        model.check_version(sent.model_version)
        infer = InferCall(self._backend, self._repository.statistics, model, sent.model_name)
        left_s = call.context.time_remaining()
        if left_s is not None and math.isfinite(left_s):
            call.headers[TIMEOUT] = f"{max(left_s, 0.001):.6f}"
        try:
            revision, invocation = infer.submit(
                infer_request(sent), call.headers, request_id, received_s, call.caller
            )
        except PilotflameError as error:
            infer.refused(infer.function, error, request_id, call.caller)
            raise
        try:
            output = await invocation.output
        except asyncio.CancelledError:
            revision.cancel(invocation)
            raise
        finally:
            if invocation.output.done() and not invocation.output.cancelled():
                infer.count(invocation)
        call.context.set_trailing_metadata(
            [(name.lower(), text) for name, text in invocation_headers(invocation).items()]
        )
        return infer_response(output, sent.model_name, model.version, sent.id)

    async def _stream(self, call: GrpcCall) -> None:
        """Answer each request of a stream when it is done. At most MOST_STREAMED of them run at a time."""
        places, writing = asyncio.Semaphore(MOST_STREAMED), asyncio.Lock()

        async def answer(sent: Any) -> None:
            try:
                fields: dict[str, Any] = {"infer_response": await self.infer(sent, call)}
            except PilotflameError as error:
                fields = {"error_message": error_text(error), "infer_response": {"id": sent.id}}
            finally:
                places.release()
            async with writing:
                await call.context.write(message("ModelStreamInferResponse", **fields))

        async with asyncio.TaskGroup() as tasks:
            while (sent := await call.context.read()) is not grpc.aio.EOF:
                await places.acquire()
                tasks.create_task(answer(sent))

    # -- the server and its models

    async def live(self, _request: Any, _call: GrpcCall) -> Message:
        return message("ServerLiveResponse", live=True)

    async def ready(self, _request: Any, _call: GrpcCall) -> Message:
        return message("ServerReadyResponse", ready=True)

    async def server_metadata(self, _request: Any, _call: GrpcCall) -> Message:
        return message("ServerMetadataResponse", **server_metadata())

    async def model_ready(self, request: Any, call: GrpcCall) -> Message:
        return message("ModelReadyResponse", ready=self._model(request, call).ready)

    async def model_metadata(self, request: Any, call: GrpcCall) -> Message:
        return message("ModelMetadataResponse", **self._model(request, call).metadata(request.name))

    async def model_config(self, request: Any, call: GrpcCall) -> Message:
        config = self._model(request, call).config(request.name)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = _DATA_TYPES[tensor["data_type"].removeprefix("TYPE_")]
        return message("ModelConfigResponse", config=config)

    async def model_statistics(self, request: Any, call: GrpcCall) -> Message:
        if request.name:
            found = [self._repository.statistics.of(self._model(request, call), request.name)]
        else:
            found = self._repository.counts(self._names(call))
        for one in found:
            del one["batch_stats"], one["memory_usage"]
        return message("ModelStatisticsResponse", model_stats=found)

    def _model(self, request: Any, call: GrpcCall) -> TensorModel:
        model = self._repository.models.find(request.name, call.caller.check)
        model.check_version(request.version)
        return model

    def _names(self, call: GrpcCall) -> list[str]:
        every = (live.record.function for live in self._backend.functions.all())
        return [name for name in every if call.caller.allows(name)]

    # -- the repository

    async def index(self, request: Any, call: GrpcCall) -> Message:
        rows = self._repository.index(self._names(call), ready=request.ready)
        return message("RepositoryIndexResponse", models=rows)

    async def load(self, request: Any, call: GrpcCall) -> Message:
        try:
            self._check_owner(request, call, "load")
            await self._repository.load(request.model_name, parameters_of(request.parameters))
        except PilotflameError as error:
            error.message = f"failed to load '{request.model_name[:80]}': {error.message}"
            raise
        return message("RepositoryModelLoadResponse")

    async def unload(self, request: Any, call: GrpcCall) -> Message:
        self._check_owner(request, call, "unload")
        await self._repository.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")

    def _check_owner(self, request: Any, call: GrpcCall, verb: str) -> None:
        """Raise the guard's error unless the caller may change this function."""
        route = ("POST", f"/v2/repository/models/{{function}}/{verb}")
        self._entrance.admit(call.headers, route, function_of(request.model_name)).leave()


_READS = ("GET", _MODEL_ROUTE)
METHODS: dict[str, Method] = {
    "ServerLive": Method("ServerLiveRequest", None, GrpcServer.live),
    "ServerReady": Method("ServerReadyRequest", None, GrpcServer.ready),
    "ServerMetadata": Method("ServerMetadataRequest", None, GrpcServer.server_metadata),
    "ModelReady": Method("ModelReadyRequest", _READS, GrpcServer.model_ready),
    "ModelMetadata": Method("ModelMetadataRequest", _READS, GrpcServer.model_metadata),
    "ModelConfig": Method("ModelConfigRequest", _READS, GrpcServer.model_config),
    "ModelStatistics": Method("ModelStatisticsRequest", _READS, GrpcServer.model_statistics),
    "ModelInfer": Method("ModelInferRequest", ("POST", f"{_MODEL_ROUTE}/infer"), GrpcServer.infer),
    "RepositoryIndex": Method("RepositoryIndexRequest", ("POST", "/v2/repository/index"), GrpcServer.index),
    "RepositoryModelLoad": Method(
        "RepositoryModelLoadRequest", ("POST", "/v2/repository/models/{function}/load"), GrpcServer.load
    ),
    "RepositoryModelUnload": Method(
        "RepositoryModelUnloadRequest", ("POST", "/v2/repository/models/{function}/unload"), GrpcServer.unload
    ),
}
