"""Runs a request for inference as an invocation, and makes its response."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import orjson

from ....errors import NotSupported, OutputInvalid, PilotflameError
from ....handlers.arrays import TENSORS_TYPE
from ....handlers.codec import BYTES_TYPE, JSON_TYPE
from ...calls.serving.invocation import Invocation, Output
from ...calls.serving.revision import Revision
from ...front.api.backend import Backend
from ...front.api.invoke import Invoker
from ...front.http.requests import Headers
from ...front.http.responses import Response, invocation_headers
from ...ground.access.keys import Caller
from .errors import oip_error_reply
from .infer_request import HEADER_LENGTH, InferRequest
from .model import TensorModel
from .statistics import Statistics

_LENGTH = f"{TENSORS_TYPE};header="
_HEADER_NAME = str(HEADER_LENGTH)
_MAX_DIGITS = 12


class InferCall(Invoker):
    """One request for inference. The gateway serves it through the methods of `Invoker`."""

    def __init__(
        self, backend: Backend, statistics: Statistics, model: TensorModel, name: str, *, streams: bool = False
    ) -> None:  # fmt: skip
        """`name` is the model's name as the client writes it. Raise NotSupported if the model may send several
        responses to a request, unless `streams` is True.
        """
        super().__init__(backend)
        if model.decoupled and not streams:
            message = f"{name} sends several responses: this call doesn't support models with decoupled transaction policy."
            raise NotSupported(message, remedy="Call ModelStreamInfer over gRPC, or /invoke.")
        self.model, self.function = model, model.live.record.function
        self._name, self._statistics, self._id = name, statistics, ""

    def begin(
        self, name: str, headers: Headers, request_id: str, body: bytes, received_s: float, caller: Caller,
        on_end: Callable[[], None] | None = None, **_: Any,
    ) -> tuple[Revision, Invocation]:  # fmt: skip
        """Submit the request in an HTTP body."""
        return self.submit(
            InferRequest.read(headers, body, self.model), headers, request_id, received_s, caller, on_end
        )

    def submit(
        self, asked: InferRequest, headers: Headers, request_id: str, received_s: float, caller: Caller,
        on_end: Callable[[], None] | None = None,
    ) -> tuple[Revision, Invocation]:  # fmt: skip
        """Submit a request. Return (revision, invocation). Raise the errors of `Invoker.begin`."""
        max_batch = self.model.largest_batch(asked.rows)
        self._id, fields = asked.id, {"model_name": self._name, "model_version": self.model.version}
        return super().begin(
            self.function, asked.with_headers(headers), request_id, asked.body, received_s, caller, on_end,
            content_type=asked.content_type, accept=f"{asked.accept};fields={quote(orjson.dumps(fields))}", extra=asked.extra,
            max_batch=max_batch,
        )  # fmt: skip

    def refused(self, name: str, error: PilotflameError, request_id: str, caller: Caller) -> Response:
        super().refused(name, error, request_id, caller)
        self._statistics.note_refused(self.function)
        return oip_error_reply(error, request_id)

    def answered(self, name: str, invocation: Invocation, caller: Caller) -> Response:
        self.count(invocation)
        error, headers = invocation.output.exception(), invocation_headers(invocation)
        if isinstance(error, PilotflameError):
            reply = oip_error_reply(error, invocation.id)
            return reply._replace(headers=headers | reply.headers)
        output = invocation.output.result()
        header_bytes, payload = tensors_header(output), output.payload
        is_json = header_bytes == len(payload)
        if self._id:
            # The worker does not write the id, because the response cache gives one output to calls with different ids.
            own = b'{"id":%s,' % orjson.dumps(self._id)
            header_bytes, payload = header_bytes + len(own) - 1, own + memoryview(payload)[1:]
        if is_json:
            return Response(200, {**headers, "Content-Type": JSON_TYPE}, payload)
        headers[_HEADER_NAME] = str(header_bytes)
        return Response(200, {**headers, "Content-Type": BYTES_TYPE}, payload)

    def count(self, invocation: Invocation) -> None:
        """Count an invocation that has ended with an output or an error."""
        invocation.timeline.mark_responded(time.monotonic())
        failed = invocation.output.exception() is not None
        self._statistics.note(self.function, invocation.timeline, failed=failed)


def tensors_header(output: Output) -> int:
    """Return the length of the JSON header of a worker's output. Raise OutputInvalid if the output has no tensors."""
    length = output.content_type.removeprefix(_LENGTH)
    if not length.isdecimal() or len(length) > _MAX_DIGITS or not 0 < int(length) <= len(output.payload):
        raise OutputInvalid(f"The output is {output.content_type[:80]!r}, not tensors.")
    return int(length)
