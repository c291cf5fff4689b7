"""The board: who waits for news of which job, within this process. Holds nothing of the jobs themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Notifications:
    """Readers of a job are told that it changed; what it changed to they look up."""

    def __init__(self) -> None:
        self._readers: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def reading(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the job has changed since it was cleared. Look after entering, not before."""
        news = asyncio.Event()
        self._readers.setdefault(job_id, set()).add(news)
        try:
            yield news
        finally:
            readers = self._readers[job_id]
            readers.discard(news)
            if not readers:
                del self._readers[job_id]

    def tell(self, job_id: str) -> None:
        """The job changed: its state, its progress, or a piece was stored."""
        for news in self._readers.get(job_id, ()):
            news.set()
