"""Calls that block, each in a thread that no exit waits for: a long poll may take 20 s, a gateway's end may not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockingCall(Generic[T]):
    """One call. If nobody waits for it any more when it ends, `unwanted` is given its outcome, in a thread too."""

    def __init__(self, call: Callable[[], T], unwanted: Callable[[T], object] | None = None) -> None:
        self._call = call
        self._unwanted = unwanted
        self._lock = threading.Lock()
        self._given_up = False
        self._ended: list[T] = []

    async def outcome(self) -> T:
        """Runs it, and gives or raises what it did."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[T] = loop.create_future()
        threading.Thread(target=self._run, args=(loop, told), name="pilotflame-call", daemon=True).start()
        try:
            return await told
        except asyncio.CancelledError:
            with self._lock:
                self._given_up = True
                ended = self._ended
            if (
                ended and self._unwanted is not None
            ):  # it ended in the very moment in which nobody wanted it any more
                threading.Thread(target=self._unwanted, args=ended, daemon=True).start()
            raise

    def _run(self, loop: asyncio.AbstractEventLoop, told: asyncio.Future[T]) -> None:
        try:
            found = self._call()
        except Exception as error:  # noqa: BLE001  whatever it is belongs to who asked, in the other thread
            self._tell(loop, partial(_fail, told, error))
            return
        with self._lock:
            wanted = not self._given_up and self._tell(loop, partial(_answer, told, found))
            if wanted:
                self._ended.append(found)
        if not wanted and self._unwanted is not None:
            self._unwanted(found)

    @staticmethod
    def _tell(loop: asyncio.AbstractEventLoop, tell: Callable[[], object]) -> bool:
        try:
            loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed: the gateway is gone
            return False
        return True


def _answer(told: asyncio.Future[T], found: T) -> None:
    if not told.done():
        told.set_result(found)


def _fail(told: asyncio.Future[T], error: Exception) -> None:
    if not told.done():
        told.set_exception(error)
