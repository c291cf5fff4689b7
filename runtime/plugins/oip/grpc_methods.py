"""Answers the methods of the protocol's gRPC service. `grpc_server.py` admits the calls and transfers the messages."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message
from multidict import CIMultiDict

from ....errors import BadInput, CallEnded, InvocationError, Overloaded, PilotflameError
from ...calls.serving.invocation import Invocation, Output
from ...front.api.backend import Backend
from ...front.api.plugin import Entrance
from ...front.http.event_stream import LAST_EVENT_S
from ...front.http.parsed_bodies import PARSED_BODIES
from ...front.http.requests import TIMEOUT, request_id_of, too_large
from ...front.http.responses import MAX_ON_LOOP_BYTES, invocation_headers
from ...ground.access.fair_share import SharedRoom
from ...ground.access.keys import Caller
from .errors import load_failure
from .grpc_messages import message, parameters_of
from .grpc_port import GrpcConnection
from .grpc_requests import SentRequest, infer_response, is_final, output_of
from .infer_call import InferCall, tensors_header
from .infer_request import InferRequest
from .model import TensorModel, function_of, server_metadata
from .repository import Repository

_DATA_TYPES = {
    name: number
    for number, name in enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING", "BF16"),
        start=1,
    )
}  # fmt: skip
_MODEL_ROUTE = "/v2/models/{model}"


class Responses:
    """Writes the responses to a call. The bytes of each response count in `room` until the caller has read it, or until `close`."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], room: SharedRoom, owner: str) -> None:
        self._context, self._room, self._owner = context, room, owner
        self._writing = asyncio.Lock()
        self.unread = 0
        """The bytes of the responses that are being written, or whose write was cancelled."""

    async def write(self, response: Message, timeout_s: float | None = None) -> None:
        """Write a response. If the write is cancelled, its bytes still count until `close`: gRPC keeps the response in memory
        until the caller reads it or disconnects.

        Raise CallEnded if the owner's callers have left too many bytes unread, TimeoutError if the write takes longer
        than `timeout_s`, and gRPC's InternalError if the caller has gone.
        """
        size = response.ByteSize()
        if not self._room.takes(self._owner, size):
            fault = "The gateway holds as many bytes of responses as it may, which callers have not read."
            raise CallEnded.after(Overloaded(fault, remedy="Read the responses to your other requests."))
        self._room.add(self._owner, size)
        self.unread += size
        async with self._writing, asyncio.timeout(timeout_s):
            await self._context.write(response)
        self._room.remove(self._owner, size)
        self.unread -= size

    def close(self) -> None:
        """Stop counting the unread responses."""
        self._room.remove(self._owner, self.unread)
        self.unread = 0


class GrpcCall(NamedTuple):
    """An admitted call: its connection, its headers, its caller, gRPC's context, and its responses."""

    connection: GrpcConnection

    headers: CIMultiDict[str]
    caller: Caller
    context: grpc.aio.ServicerContext[Any, Any]
    responses: Responses


class _Running(NamedTuple):
    """A submitted request. All its responses have the fields in `names`."""

    asked: InferRequest
    invocation: Invocation
    names: dict[str, str]


class GrpcMethods:
    """The methods for the models of a gateway."""

    def __init__(self, backend: Backend, repository: Repository, entrance: Entrance) -> None:
        self._backend, self._repository, self._entrance = backend, repository, entrance

    async def infer(self, sent: SentRequest, call: GrpcCall) -> Message:
        """Return the response to a ModelInferRequest. Raise the errors of the call."""
        async with self._running(sent, call) as running:
            output = await running.invocation.wait()
        headers = invocation_headers(running.invocation).items()
        call.context.set_trailing_metadata([(name.lower(), text) for name, text in headers])
        return await self._response(output, call, **running.names)

    async def stream(
        self, sent: SentRequest, call: GrpcCall, write: Callable[[Message], Awaitable[None]]
    ) -> Message | None:
        """Write the outputs that a function yields as responses to a ModelInferRequest of a stream.

        Do not write the last response, but return it: the output of a function that does not yield, or an empty response if
        the caller wants it. Return None if no response follows. Raise TimeoutError if the function's outputs are not
        written LAST_EVENT_S after the deadline.
        """
        async with self._running(sent, call, streams=True) as running:
            stream, names = running.invocation.stream, running.names
            if stream is None:
                output = await running.invocation.wait()
                return await self._response(output, call, **names, parameters=is_final(True))
            left_s = max(0.0, running.invocation.deadline_s - time.monotonic())
            async with asyncio.timeout(left_s + LAST_EVENT_S):
                while pieces := await stream.take():
                    for piece in pieces:
                        output, final = output_of(piece), is_final(False)
                        await write(await self._response(output, call, **names, parameters=final))
                        stream.consumed(1)
                await running.invocation.wait()
        return (
            message("ModelInferResponse", **names, parameters=is_final(True))
            if running.asked.empty_final
            else None
        )

    async def _response(self, output: Output, call: GrpcCall, **fields: Any) -> Message:
        """Return the response with a worker's output; a thread reads a long header. Raise OutputInvalid if it has no
        tensors.
        """
        header = output.payload[: tensors_header(output)]
        if len(header) <= MAX_ON_LOOP_BYTES:
            return infer_response(output.payload, header, **fields)
        return await self._entrance.app[PARSED_BODIES].read(
            call.caller.owner,
            header,
            lambda header: infer_response(output.payload, header, **fields),
            called=True,
        )

    @contextlib.asynccontextmanager
    async def _running(
        self, sent: SentRequest, call: GrpcCall, *, streams: bool = False
    ) -> AsyncIterator[_Running]:
        """Submit the request, and run the block. Cancel the request if it still runs at the end of the block."""
        received_s, request_id = time.monotonic(), request_id_of(call.headers)
        model = self._model(sent.model_name, sent.model_version, call)
        infer = InferCall(self._backend, self._repository.statistics, model, sent.model_name, streams=streams)
        headers, left_s = CIMultiDict(call.headers), call.context.time_remaining()
        if left_s is not None and math.isfinite(left_s):
            headers[TIMEOUT] = f"{max(left_s, 0.001):.6f}"
        try:
            asked = self._read(sent, model)
            revision, invocation = infer.submit(asked, headers, request_id, received_s, call.caller)
        except PilotflameError as error:
            infer.refused(infer.function, error, request_id, call.caller)
            raise
        try:
            names = {"model_name": sent.model_name, "model_version": model.version, "id": sent.id}
            yield _Running(asked, invocation, names)
        finally:
            if not invocation.ended:
                revision.cancel(invocation)
            if not invocation.output.cancelled():
                infer.count(invocation)

    def _read(self, sent: SentRequest, model: TensorModel) -> InferRequest:
        """Return the request in a message. Raise InputTooLarge if the function takes no message of this size, or the
        error of an invalid request.
        """
        most = self._backend.body_limit(model.live.revision)
        if sent.size > most:
            raise too_large(most, self._backend.too_large_remedy(most, model.live.revision))
        if isinstance(sent.asked, PilotflameError):
            raise sent.asked
        return sent.asked

    # -- the server and its models

    async def live(self, _request: Any, _call: GrpcCall) -> Message:
        return message("ServerLiveResponse", live=True)

    async def ready(self, _request: Any, _call: GrpcCall) -> Message:
        return message("ServerReadyResponse", ready=True)

    async def server_metadata(self, _request: Any, _call: GrpcCall) -> Message:
        return message("ServerMetadataResponse", **server_metadata())

    async def model_ready(self, request: Any, call: GrpcCall) -> Message:
        return message("ModelReadyResponse", ready=self._model(request.name, request.version, call).ready)

    async def model_metadata(self, request: Any, call: GrpcCall) -> Message:
        return message(
            "ModelMetadataResponse", **self._model(request.name, request.version, call).metadata(request.name)
        )

    async def model_config(self, request: Any, call: GrpcCall) -> Message:
        config = self._model(request.name, request.version, call).config(request.name)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = _DATA_TYPES[tensor["data_type"].removeprefix("TYPE_")]
        return message("ModelConfigResponse", config=config)

    async def model_statistics(self, request: Any, call: GrpcCall) -> Message:
        if request.name:
            found = [
                self._repository.statistics.of(self._model(request.name, request.version, call), request.name)
            ]
        else:
            found = self._repository.counts(self._names(call))
        for one in found:
            del one["batch_stats"], one["memory_usage"]
        return message("ModelStatisticsResponse", model_stats=found)

    def _model(self, name: str, version: str, call: GrpcCall) -> TensorModel:
        model = self._repository.models.find(name, call.caller.check)
        model.check_version(version)
        return model

    def _names(self, call: GrpcCall) -> list[str]:
        every = (live.record.function for live in self._backend.functions.all())
        return [name for name in every if call.caller.allows(name)]

    # -- the repository

    async def index(self, request: Any, call: GrpcCall) -> Message:
        rows = self._repository.index(self._names(call), ready=request.ready)
        return message("RepositoryIndexResponse", models=rows)

    async def load(self, request: Any, call: GrpcCall) -> Message:
        parameters = parameters_of(request.parameters)
        try:
            await self._change(LOAD, request, call, lambda name: self._repository.load(name, parameters))
        except BadInput as error:
            # InvocationError has the status INTERNAL. Triton sends it for a failed load, and clients look for it.
            raise InvocationError(
                load_failure(request.model_name) + error.message, remedy=error.remedy
            ) from None
        except PilotflameError as error:
            error.message = load_failure(request.model_name) + error.message
            raise
        return message("RepositoryModelLoadResponse")

    async def unload(self, request: Any, call: GrpcCall) -> Message:
        await self._change(UNLOAD, request, call, self._repository.unload)
        return message("RepositoryModelUnloadResponse")

    async def _change(
        self, route: tuple[str, str], request: Any, call: GrpcCall, change: Callable[[str], Awaitable[None]]
    ) -> None:
        """Call `change` if the caller may change the function. Write the outcome to the audit log."""
        function, outcome = function_of(request.model_name), "broke off"
        try:
            self._entrance.guard.check_function(call.caller, route, function)
            await change(function)
            outcome = "200"
        except PilotflameError as error:
            outcome = f"{error.status} {error.code}"
            raise
        finally:
            self._entrance.audit.note_call(
                route,
                call.caller.owner,
                call.connection.address,
                function,
                outcome,
                request_id_of(call.headers),
            )


class Method(NamedTuple):
    """A method of the service."""

    request: str
    route: tuple[str, str] | None
    """The HTTP route that does the same. The caller needs the scope of this route. If it is None, the method needs no key, and
    its requests are empty.
    """
    answer: Callable[[GrpcMethods, Any, GrpcCall], Awaitable[Message]]


LOAD, UNLOAD = (("POST", f"/v2/repository/models/{{function}}/{verb}") for verb in ("load", "unload"))
_READS = ("GET", _MODEL_ROUTE)
METHODS: dict[str, Method] = {
    "ServerLive": Method("ServerLiveRequest", None, GrpcMethods.live),
    "ServerReady": Method("ServerReadyRequest", None, GrpcMethods.ready),
    "ServerMetadata": Method("ServerMetadataRequest", None, GrpcMethods.server_metadata),
    "ModelReady": Method("ModelReadyRequest", _READS, GrpcMethods.model_ready),
    "ModelMetadata": Method("ModelMetadataRequest", _READS, GrpcMethods.model_metadata),
    "ModelConfig": Method("ModelConfigRequest", _READS, GrpcMethods.model_config),
    "ModelStatistics": Method("ModelStatisticsRequest", _READS, GrpcMethods.model_statistics),
    "ModelInfer": Method("ModelInferRequest", ("POST", f"{_MODEL_ROUTE}/infer"), GrpcMethods.infer),
    "RepositoryIndex": Method("RepositoryIndexRequest", ("POST", "/v2/repository/index"), GrpcMethods.index),
    "RepositoryModelLoad": Method("RepositoryModelLoadRequest", LOAD, GrpcMethods.load),
    "RepositoryModelUnload": Method("RepositoryModelUnloadRequest", UNLOAD, GrpcMethods.unload),
}
