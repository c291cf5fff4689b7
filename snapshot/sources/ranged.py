"""The plain reading methods of a source, made from its connections, with retries."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod

from ...errors import SourceUnavailable
from .source import Connection, ObjectInfo

ATTEMPTS = 6
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0


class Ranged(ABC):
    """`size` and `read_into` of a source, which has to bring `stat` and `connect`."""

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo: ...

    @abstractmethod
    def connect(self) -> Connection: ...

    def size(self, name: str) -> int:
        return self.stat(name).size_bytes

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        """See Source; tries again what may pass, up to six times in a row."""
        info = self.stat(name)
        end = min(info.size_bytes, offset + len(view))
        at, patience = offset, Patience()
        connection = self.connect()
        try:
            while at < end:
                try:
                    connection.begin(name, at, end, info.version)
                    while at < end and (count := connection.read_into(view[at - offset : end - offset])):
                        at += count
                        patience.progressed()
                except SourceUnavailable as error:
                    patience.failed(error)
        finally:
            connection.close()
        return max(0, at - offset)


class Patience:
    """How often one operation failed in a row, and how long to wait before the next try."""

    def __init__(self) -> None:
        self._failures = 0

    def progressed(self) -> None:
        """It got somewhere: count from the start."""
        self._failures = 0

    def failed(self, error: SourceUnavailable) -> None:
        """Wait until it is time to try again; raises `error` if it was the last try."""
        self._failures += 1
        if self._failures >= ATTEMPTS:
            raise error
        # Nobody sets this event: a delay between tries is all there is to wait for.
        threading.Event().wait(delay_s(self._failures, error.retry_after_s))


def delay_s(attempt: int, retry_after_s: float | None = None) -> float:
    """How long to wait before try `attempt` + 1: doubling, with full jitter, at least what the source asked for.

    Source: M. Brooker, "Exponential backoff and jitter" (AWS architecture blog, 2015).
    """
    drawn_s = random.uniform(0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**attempt))  # noqa: S311  jitter, no secret
    return max(drawn_s, min(retry_after_s or 0.0, 2 * LONGEST_DELAY_S))
