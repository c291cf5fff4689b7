"""Parses and checks large request bodies in a thread, one at a time. The owners of API keys take turns.

A parser keeps the interpreter's lock, also in a thread. There is only one such thread, so that the event loop runs
between any two bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from aiohttp import web

from ....errors import CallEnded, Overloaded
from ...ground.access.fair_share import SharedRoom
from ...ground.access.fair_threads import FairThreads
from .requests import caller_of
from .responses import MAX_ON_LOOP_BYTES

MAX_WAITING_BYTES = 256 << 20
RETRY_S = 1.0
T = TypeVar("T")


class ParsedBodies:
    """The large bodies that are being parsed or wait to be parsed."""

    def __init__(self, most: int = MAX_WAITING_BYTES) -> None:
        self._threads, self._room = FairThreads(1, "bodies"), SharedRoom(most)

    async def read(self, owner: str, body: bytes, work: Callable[[bytes], T], *, called: bool = False) -> T:
        """Return the result of `work` with the body. Raise what `work` raises, and Overloaded if the body exceeds the
        owner's share of the limit. If `called` is True, the body is the output of a function: raise CallEnded
        instead of Overloaded.
        """
        if not self._room.takes(owner, len(body)):
            message = "As many bytes of requests and of outputs wait to be parsed as may wait."
            error = Overloaded(message, remedy="Try again.", details={"retry_after_s": RETRY_S})
            raise CallEnded.after(error) if called else error
        self._room.add(owner, len(body))
        try:
            return await self._threads.run(partial(work, body), owner=owner)
        finally:
            self._room.remove(owner, len(body))

    def close(self) -> None:
        self._threads.close()


PARSED_BODIES = web.AppKey("parsed_bodies", ParsedBodies)


async def parsed(request: web.Request, body: bytes, work: Callable[[bytes], T], *, called: bool = False) -> T:
    """Return the result of `work`, which parses and checks `body`: a request's body, or with `called`, the output of a function."""
    if len(body) <= MAX_ON_LOOP_BYTES:
        return work(body)
    return await request.app[PARSED_BODIES].read(caller_of(request).owner, body, work, called=called)
