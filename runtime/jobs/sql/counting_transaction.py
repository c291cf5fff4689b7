"""A transaction that reads and changes the counters of its group in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..stored.job import COUNTERS, JobCounts, JobState, NewJob
from .connection import SqlRow
from .transaction import Transaction


class SharedCounts(Protocol):
    """The counters of functions and the stored bytes. All changes of a group read and change them here."""

    def of(self, function: str, owner: str) -> Mapping[str, int]:
        """Return the row of `counters` for a function and an owner, by column."""

    def bytes_of(self, owner: str) -> int: ...

    def count(self, function: str, owner: str, added: dict[str, int]) -> None:
        """Add to the counters of all jobs of a function, and to the counters of the owner's jobs of this function."""

    def add_bytes(self, owner: str, added: int) -> None: ...


class CountingTransaction(Transaction):
    """One caller's part of a group's transaction."""

    def __init__(self, group: SharedCounts, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._group = group

    def counts(self, function: str, owner: str) -> JobCounts:
        return JobCounts(**self._group.of(function, owner))

    def stored_bytes(self, *owners: str) -> dict[str, int]:
        return {owner: self._group.bytes_of(owner) for owner in owners}

    def _add_bytes(self, owner: str, added: int) -> None:
        self._group.add_bytes(owner, added)

    def _count_new(self, new: NewJob, state: JobState) -> None:
        queued = {"queued_bytes": len(new.input)} if state is JobState.IN_QUEUE else {}
        self._group.count(new.function, new.owner, {COUNTERS[state]: 1, **queued})

    def _count(self, row: SqlRow, was: JobState, to: JobState, *, retried: bool) -> None:
        queued = (to is JobState.IN_QUEUE) - (was is JobState.IN_QUEUE)
        added = {COUNTERS[was]: -1, COUNTERS[to]: 1, "queued_bytes": queued * row["size"]}
        self._group.count(row["function"], row["owner"], {**added, "retried": int(retried)})
