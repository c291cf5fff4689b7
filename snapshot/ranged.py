"""The plain reading methods of a source, made from its connections, with retries."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod

from ..errors import SourceUnavailable
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
        """See Source; tries again what may pass, up to six times."""
        info = self.stat(name)
        end = min(info.size_bytes, offset + len(view))
        at, attempt = offset, 0
        connection = self.connect()
        try:
            while at < end:
                try:
                    connection.begin(name, at, end, info.version)
                    while at < end and (count := connection.read_into(view[at - offset : end - offset])):
                        at, attempt = at + count, 0
                except SourceUnavailable as error:
                    attempt += 1
                    if attempt >= ATTEMPTS:
                        raise
                    time.sleep(delay_s(attempt, error.retry_after_s))
        finally:
            connection.close()
        return max(0, at - offset)


def delay_s(attempt: int, retry_after_s: float | None = None) -> float:
    """How long to wait before try `attempt` + 1: doubling, with full jitter, at least what the source asked for.

    Source: M. Brooker, "Exponential backoff and jitter" (AWS architecture blog, 2015).
    """
    drawn_s = random.uniform(0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**attempt))  # noqa: S311  jitter, no secret
    return max(drawn_s, min(retry_after_s or 0.0, 2 * LONGEST_DELAY_S))
