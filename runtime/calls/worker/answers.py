"""Turns the events and the answers of a handler's calls into Python objects and frames."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path
from typing import Any

from ....errors import (
    OF_HANDLERS,
    BadInput,
    Cancelled,
    EngineStopped,
    HandlerFailed,
    InputInvalid,
    InputTooLarge,
    OutputInvalid,
    Overloaded,
    PilotflameError,
    SnapshotChanged,
    SnapshotError,
    UnsupportedMedia,
    not_whole,
)
from ....handlers.arrays import TENSORS_TYPE
from ....handlers.codec import JSON_TYPE
from ....handlers.failure import OUT_OF_MEMORY_REMEDY, cut, explain, is_out_of_memory
from ....handlers.handler import Handler
from ..link.frames import HEADER, MAX_ERROR_BYTES, FrameKind, Timing, check_output, encode, encode_json
from .call import Call
from .devices import may_be_of_device

# Callers get these errors unchanged. Other exceptions become HandlerFailed, or ActivationFailed if weights cannot be read.
TOLD = (BadInput, HandlerFailed, InputInvalid, InputTooLarge, OutputInvalid, Overloaded, UnsupportedMedia)

# The package of the clients with which handlers call other functions.
_CLIENTS = "pilotflame.runtime.command.calling."


class AnswerFrames:
    """Decodes one handler's events, and makes the frames of its answers and errors."""

    def __init__(self, handler: Handler, root: Path) -> None:
        """`root` is the folder of the handler's files, which errors name."""
        self._handler, self._root = handler, root
        self.suspicious = False
        """True if a call has failed with an error that a failed device or changed weights may have caused."""

    def decode(self, group: list[Call]) -> tuple[list[Call], list[Any], list[bytes]]:
        """Return the invocations to run, their events, and error frames for cancelled and invalid invocations."""
        calls, events, frames = [], [], []
        for call in group:
            if call.cancellation.flag:
                frames.append(self.error_frame(call, Cancelled("The caller went away before the handler started.")))  # fmt: skip
                continue
            try:
                events.append(self._handler.input.decode(call.body, call.content_type))
                calls.append(call)
            except Exception as error:  # noqa: BLE001  the user's validators run here
                frames.append(self.error_frame(call, self.describe(error)))
        return calls, events, frames

    def result_frames(self, calls: list[Call], answer: Any, started_s: float) -> list[bytes]:
        """Return a RESULT or ERROR frame for each of `calls`, which ran in one handler call.

        Raise OutputInvalid if a batch handler did not return one answer per event.
        """
        ended_s = time.monotonic()
        return [
            self._result_frame(call, item, Timing(started_s - call.received_s, ended_s - started_s, len(calls), call.cost))
            for call, item in zip(calls, self._handler.answers(answer, len(calls)), strict=True)
        ]  # fmt: skip

    def _result_frame(self, call: Call, item: Any, timing: Timing) -> bytes:
        if isinstance(item, BaseException):
            return self.error_frame(call, self.describe(item))
        try:
            payload, content_type = self._handler.output.encode(item, call.accept)
            check_output(payload)
        except Exception as error:  # noqa: BLE001  the user's serializers run here
            return self.error_frame(call, self.describe(error))
        head = timing.pack() if content_type == JSON_TYPE else timing.pack() + content_type.encode()
        return encode(FrameKind.RESULT, call.channel, head, payload)

    def chunk_frame(self, call: Call, value: Any) -> tuple[bytes, int]:
        """Return the frame of a chunk, and the size that counts against the credit. Raise OutputInvalid if the chunk is
        neither JSON nor tensors, or is too large.
        """
        accept = call.accept if call.accept.startswith(TENSORS_TYPE) else ""
        payload, content_type = self._handler.output.encode(value, accept)
        if content_type.startswith(TENSORS_TYPE):
            # A frame of a chunk has no head, so the content type and a line feed come before tensors.
            payload = b"%s\n%s" % (content_type.encode(), payload)
        elif content_type != JSON_TYPE:
            raise OutputInvalid("A chunk of a stream must be JSON, not bytes.", remedy="Decode the bytes.")
        check_output(payload)
        frame = encode(FrameKind.CHUNK, call.channel, b"", payload)
        return frame, len(frame) - HEADER.size

    def end_frame(self, call: Call, started_s: float) -> bytes:
        timing = Timing(started_s - call.received_s, time.monotonic() - started_s)
        return encode(FrameKind.END, call.channel, timing.pack())

    def failure_frames(self, calls: list[Call], error: BaseException) -> list[bytes]:
        described = self.describe(error)
        if isinstance(described, EngineStopped):
            calls[0].context.retire()
        return [self.error_frame(call, described) for call in calls]

    def error_frame(self, call: Call, error: PilotflameError) -> bytes:
        with contextlib.suppress(TypeError):
            frame = encode_json(FrameKind.ERROR, call.channel, error.to_wire(private=True))
            if len(frame) <= MAX_ERROR_BYTES:
                return frame
        # The frame is too large, a text has half a surrogate pair, or the details are not JSON. Repair texts and omit
        # details.
        texts = {"type": error.code, "message": error.message, "remedy": error.remedy}
        plain = {name: cut(str(text)).encode("utf-8", "replace").decode() for name, text in texts.items()}
        return encode_json(FrameKind.ERROR, call.channel, plain)

    def describe(self, error: BaseException, what: str = "The handler") -> PilotflameError:
        """Return the error that the caller gets for an exception of user code. `what` names that code."""
        if _of_another_call(error):
            return explain(HandlerFailed, what, error, self._root)
        self.suspicious = self.suspicious or may_be_of_device(error) or isinstance(error, SnapshotChanged)
        if isinstance(error, TOLD):
            return error
        if isinstance(error, SnapshotError) and not isinstance(error, OF_HANDLERS):
            return not_whole(error)
        remedy = OUT_OF_MEMORY_REMEDY if is_out_of_memory(error) else ""
        return explain(HandlerFailed, what, error, self._root, remedy=remedy)


def _of_another_call(error: BaseException) -> bool:
    """Return True if a client of another function has raised `error`.

    Callers must not get this error unchanged, because its type and its advice to retry are about the other function's call.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith(_CLIENTS)
