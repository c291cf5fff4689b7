"""Calls a language model, and reads the pieces of its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from aiohttp import web

from ....errors import OutputInvalid, PilotflameError
from ....handlers.language_model.contract import Delta, GenerationRequest, TokenUsage
from ...calls.serving.invocation import Invocation
from ...calls.serving.revision import Revision
from ...ground.telemetry.invocation_end import GenerationEnd
from ...node.functions.live import Live
from ..api.invoke import Invoker
from ..http.parsed_bodies import parsed
from ..http.requests import dump_json, plain, request_id_of, validate_output
from ..http.responses import dumped, invocation_headers

MOST_UNREAD = 64
"""Limit for the pieces of all answers that the caller has not read."""
MOST_BYTES = 128 << 20
"""Limit for the estimated bytes of the pieces of all answers to one request. In many protocols, the gateway keeps all pieces until the end.
"""
VALUE_BYTES = 100
"""Bytes that are counted for each JSON value of a piece: a Python object is several times as large as its JSON text."""


class Deltas:
    """The pieces of the answers to several prompts, as they arrive."""

    def __init__(
        self,
        invoker: Invoker,
        request: web.Request,
        live: Live,
        events: Sequence[GenerationRequest],
        tasks: asyncio.TaskGroup,
        on_generated: Callable[[GenerationEnd], None],
    ) -> None:
        """Call the function once for each event, in `tasks`. Call `on_generated` at the end of each answer."""
        self._invoker, self._request, self._live = invoker, request, live
        self.headers = {"X-Request-Id": request_id_of(request.headers)}
        """The headers of the response. From the first piece of the first prompt on, the headers name the worker of this
        prompt and show its times.
        """
        # The queue is bounded, so that the function waits if the caller reads slowly.
        self._arrived: asyncio.Queue[tuple[int, Delta, int] | PilotflameError | None] = asyncio.Queue(
            MOST_UNREAD
        )
        self._left, self._left_bytes = len(events), MOST_BYTES
        # The call of each prompt, by the number of the prompt.
        self._calls = dict[int, tuple[Revision, Invocation]]()
        self._on_generated = on_generated
        self._running = [tasks.create_task(self._run(number, event)) for number, event in enumerate(events)]

    async def next(self) -> tuple[int, Delta, int] | None:
        """Return (number of the prompt, next piece, estimated bytes of the piece), or None after the last piece. Raise
        the function's error.
        """
        while self._left:
            found = await self._arrived.get()
            if isinstance(found, PilotflameError):
                # Raise a copy. The traceback of a raised error refers to this frame, and this frame refers to `found`,
                # so raising `found` itself would create a reference cycle.
                raise found.copied()
            if found is not None:
                return found
            self._left -= 1
        return None

    @property
    def size(self) -> int:
        """The estimated bytes of the pieces that have arrived."""
        return MOST_BYTES - self._left_bytes

    @property
    def ahead(self) -> int | None:
        """The number of the caller's own calls that workers take before the first prompt; None if its call does not
        wait.
        """
        if 0 not in self._calls:
            return None
        revision, invocation = self._calls[0]
        return revision.dispatcher.queue.own_ahead(invocation)

    def close(self) -> None:
        """Cancel the calls that still run."""
        # Remove each task from the list. A cancelled task refers to its traceback and frames, and the frames refer to
        # this object, so the list would create a reference cycle.
        while self._running:
            self._running.pop().cancel()

    async def _run(self, number: int, event: GenerationRequest) -> None:
        read = partial(delta_of, self._live.record.function)
        usage, made, calling = TokenUsage(prompt_tokens=0), 0, set[int]()
        first_s, last_s, failure = 0.0, 0.0, None
        try:
            body = await dumped(self._request, _event_of, event)
            async with aclosing(self._pieces(body, number)) as pieces:
                async for piece in pieces:
                    size = self._count(piece)
                    delta = await parsed(self._request, piece, read, called=True)
                    if delta.arguments and delta.index not in calling:
                        raise _no_call(self._live.record.function)
                    if delta.tool_calls:
                        calling.add(delta.index)
                    elif delta.text or delta.reasoning:
                        calling.discard(delta.index)
                    usage, made, last_s = delta.usage or usage, made + len(delta.tokens), time.monotonic()
                    first_s = first_s or last_s
                    await self._arrived.put((number, delta, size))
            await self._arrived.put(None)
        except PilotflameError as error:
            failure = error.copied()
            await self._arrived.put(failure)
        finally:
            if number in self._calls:
                invocation = self._calls[number][1]
                self._on_generated(
                    GenerationEnd(
                        self._live.record.function, invocation.trace, invocation.timeline.received_s, first_s, last_s,
                        usage.prompt_tokens, usage.cached_tokens, made, failure,
                    )
                )  # fmt: skip

    def _count(self, piece: bytes) -> int:
        """Count a piece, and return its estimated bytes. Raise OutputInvalid if all pieces together have more than
        MOST_BYTES.
        """
        size = len(piece) + VALUE_BYTES * (1 + piece.count(b","))
        self._left_bytes -= size
        if self._left_bytes < 0:
            message = f"The answers of {self._live.record.function} are larger than {MOST_BYTES} bytes."
            raise OutputInvalid(message, remedy="Ask for fewer tokens, answers or logprobs.")
        return size

    async def _pieces(self, body: bytes, number: int) -> AsyncGenerator[bytes]:
        """Call the function, and yield the pieces of its output. Raise its error. Cancel the call if the iterator is closed."""
        revision, invocation = self._invoker.started(self._request, self._live.record.function, body, number)
        self._calls[number] = revision, invocation
        try:
            stream = invocation.stream
            while stream is not None and (pieces := await stream.take()):
                self._note(number, invocation)
                for piece in pieces:
                    yield piece
                stream.consumed(len(pieces))
            output = await invocation.wait()
            if stream is None:
                self._note(number, invocation)
                yield output.payload
        finally:
            revision.cancel(invocation)

    def _note(self, number: int, invocation: Invocation) -> None:
        if number == 0 and "X-Worker-Id" not in self.headers:
            self.headers = invocation_headers(invocation)


def delta_of(name: str, piece: bytes) -> Delta:
    """Return a piece of the output of function `name`. Raise OutputInvalid if it is no Delta, or has too many values."""
    wrong = f"{name} is no language model: its handler yields something else than Delta."
    return validate_output(Delta, piece, wrong, "Yield pilotflame's Delta, or call it at /invoke.")


def _no_call(name: str) -> OutputInvalid:
    message = f"{name} yields arguments without a call, or after the text that follows the call."
    return OutputInvalid(message, remedy="Begin the call with tool_calls of an earlier Delta.")


def _event_of(asked: GenerationRequest) -> bytes:
    return dump_json(plain(asked))
