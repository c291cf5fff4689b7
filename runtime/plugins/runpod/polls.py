"""Remembers for each job and caller which pieces of a stream the polls have returned, because RunPod's clients do not send the last number."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from .openai_jobs import OpenAiOutput

if TYPE_CHECKING:
    from ...ground.storing.postgres import PostgresPool

MAX_POLLERS = 10_000
_READ = "SELECT last FROM polls WHERE job = ? AND owner = ?"
# Writes nothing if the job was deleted meanwhile.
_WRITE = """INSERT INTO polls (job, owner, last) SELECT id, ?2, ?3 FROM jobs WHERE id = ?1
ON CONFLICT (job, owner) DO UPDATE SET last = excluded.last RETURNING last"""
_DROP = "DELETE FROM polls WHERE job = ? AND owner = ? RETURNING last"


class Polls:
    """The polls of all callers. A poller is (job, owner). An administrator is another poller than the job's owner, so the polls of
    the one take no pieces from the other.

    With `pool`, the numbers of pieces are in the database, so that any gateway can answer the next poll. Then the methods raise JobStoreFailed.
    """

    def __init__(self, pool: PostgresPool | None) -> None:
        self._pool = pool
        # The number of the last piece for each poller. The poller that got pieces last is at the end.
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()
        # The outputs of jobs with requests of OpenAI's API, which have read the pieces that the polls have returned.
        self._outputs: dict[tuple[str, str], OpenAiOutput] = {}

    async def last(self, poller: tuple[str, str]) -> int:
        """Return the number of the last piece that a poll has returned."""
        if self._pool is None:
            return self._last.get(poller, 0)
        rows = await asyncio.to_thread(self._pool.rows, _READ, *poller)
        return int(rows[0][0]) if rows else 0

    def output(self, poller: tuple[str, str]) -> OpenAiOutput | None:
        """Remove and return the OpenAiOutput that an earlier poll at this gateway has left; None if there is none. Another poll
        at the same time gets None.
        """
        return self._outputs.pop(poller, None)

    async def note(self, poller: tuple[str, str], after: int, last: int, output: OpenAiOutput | None) -> None:
        """Let the next poll continue after the piece `last` instead of `after`. The next poll may reuse `output`."""
        if last > after:
            if self._pool is not None:
                await asyncio.to_thread(self._pool.rows, _WRITE, *poller, last)
            self._last[poller] = last
            self._last.move_to_end(poller)
            if len(self._last) > MAX_POLLERS:
                self._outputs.pop(self._last.popitem(last=False)[0], None)
        if output is not None and output.streams and poller in self._last:
            self._outputs[poller] = output

    async def forget(self, poller: tuple[str, str]) -> None:
        """Let the next poll begin with the first piece."""
        self._last.pop(poller, None)
        self._outputs.pop(poller, None)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.rows, _DROP, *poller)
