"""Calls a language model, and reads the pieces of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from aiohttp import web
from pydantic import ValidationError

from ...errors import OutputInvalid, PilotflameError
from ...handlers.language_model.contract import Delta, GenerationRequest
from ..api.invoke import Gateway
from ..functions.live import Live
from ..http.requests import dump_json, request_id_of
from ..http.responses import invocation_headers
from ..serving.invocation import Invocation
from ..serving.revision import Revision

MOST_UNREAD = 64
"""The pieces of an answer that wait for its caller."""


class Deltas:
    """The pieces of the answers to several prompts, as they come."""

    def __init__(
        self,
        gateway: Gateway,
        request: web.Request,
        live: Live,
        events: Sequence[GenerationRequest],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Call the function once for each event, in `tasks`."""
        self._gateway, self._request, self._live = gateway, request, live
        self.headers = {"X-Request-Id": request_id_of(request.headers)}
        """The headers of the response. From its first piece on, they name the worker of the first prompt, and show its times."""
        # If the caller reads slowly, the function waits.
        self._arrived: asyncio.Queue[tuple[int, Delta] | PilotflameError | None] = asyncio.Queue(MOST_UNREAD)
        self._left = len(events)
        self._first: tuple[Revision, Invocation] | None = None
        self._running = [tasks.create_task(self._run(number, event)) for number, event in enumerate(events)]

    async def next(self) -> tuple[int, Delta] | None:
        """Return the number of the prompt and the next piece; None after the last one. Raise the function's error."""
        while self._left:
            found = await self._arrived.get()
            if isinstance(found, PilotflameError):
                raise found
            if found is not None:
                return found
            self._left -= 1
        return None

    @property
    def ahead(self) -> int | None:
        """The number of the caller's own calls that a worker takes before the first prompt; None if a worker has taken it."""
        if self._first is None:
            return None
        revision, invocation = self._first
        return revision.dispatcher.queue.own_ahead(invocation)

    def close(self) -> None:
        """Cancel the calls that still run."""
        for task in self._running:
            task.cancel()

    async def _run(self, number: int, event: GenerationRequest) -> None:
        body = dump_json(event.model_dump(mode="json", exclude_unset=True))
        try:
            async with aclosing(self._pieces(body, number)) as pieces:
                async for piece in pieces:
                    delta = _delta(self._live.record.function, piece)
                    await self._arrived.put((number, delta))
            await self._arrived.put(None)
        except PilotflameError as error:
            await self._arrived.put(error)

    async def _pieces(self, body: bytes, number: int) -> AsyncGenerator[bytes]:
        """Call the function, and yield the pieces of its output. Raise its error. Cancel the call if the iterator is closed."""
        revision, invocation = self._gateway.started(self._request, self._live.record.function, body, number)
        if number == 0:
            self._first = revision, invocation
        try:
            stream = invocation.stream
            while stream is not None and (pieces := await stream.take()):
                self._note(number, invocation)
                for piece in pieces:
                    yield piece
                stream.consumed(len(pieces))
            output = await invocation.output
            if stream is None:
                self._note(number, invocation)
                yield output.payload
        finally:
            revision.cancel(invocation)

    def _note(self, number: int, invocation: Invocation) -> None:
        if number == 0 and "X-Worker-Id" not in self.headers:
            self.headers = invocation_headers(invocation)


def _delta(name: str, piece: bytes) -> Delta:
    try:
        return Delta.model_validate_json(piece)
    except ValidationError:
        message = f"{name} is no language model: its handler yields something else than Delta."
        raise OutputInvalid(message, remedy="Yield pilotflame's Delta, or call it at /invoke.") from None
