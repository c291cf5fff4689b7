"""Defines `RevisionIndex`, which stores what several gateways serve together: the functions, their revisions, and the names of the revisions' files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TrafficShare:
    """A revision that gets calls of a function. `weight` is its part of the calls. Today, a function has one share."""

    revision: str
    weight: int = 1
    tag: str = ""


@dataclass(frozen=True, slots=True)
class IndexedRevision:
    """A revision. `record` is the JSON of its record, and `files` the name of its files."""

    function: str
    revision: str
    number: int
    record: str
    files: str


@dataclass(frozen=True, slots=True)
class FunctionEntry:
    """What all gateways must serve as a function."""

    name: str
    traffic: tuple[TrafficShare, ...] = ()
    paused: bool = False
    deleted: bool = False
    """True if the function does not exist any more. Then it has no traffic and no revisions."""
    generation: int = 0
    """The number of the function's latest change. The store assigns it. Later changes of any function have larger numbers."""
    live: IndexedRevision | None = None
    """The revision of the first share. The store sets it when it reads the entry."""


class RevisionIndex(Protocol):
    """All functions, by name. All methods block, are safe to call from several threads, and raise GatewayError if the store fails."""

    def changes(self, since: int) -> list[FunctionEntry]:
        """Return the functions whose generation is larger than `since`, sorted by generation. Changes that are committed later have larger generations."""

    def entry(self, name: str) -> FunctionEntry | None:
        """Return a function; None if there never was one of this name."""

    def change(
        self, name: str, decide: Callable[[FunctionEntry | None], FunctionEntry], new: IndexedRevision | None = None
    ) -> FunctionEntry:  # fmt: skip
        """Replace a function by what `decide` makes of its present entry, with the next generation, and return the new entry.

        A `new` revision is stored with the entry. Revisions that are neither live nor among the newest are removed, and all revisions
        of a deleted function. No other change happens meanwhile. If `decide` raises an error, nothing changes. If the answer of the
        store is lost, the change may be made twice.
        """

    def revisions(self, function: str) -> list[IndexedRevision]:
        """Return the revisions of a function, the newest first."""

    def reserve(self, function: str, least: int) -> int:
        """Return a number for a new revision, at least `least`. No other call returns the same number for this function."""

    def files(self) -> list[str]:
        """Return the names of the files of all revisions."""

    def close(self) -> None:
        """Close connections. No other call may run at the same time, or later."""
