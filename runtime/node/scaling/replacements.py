"""Ends workers of replaced revisions, with their calls, when other callers of the function have waited too long.

It does no I/O and reads no clock.

A replaced revision runs the invocations that it has accepted, and its workers count against all limits. Where old and new
workers do not fit, the callers of the function wait for the old workers. Once the callers have waited for `drain_s`, old
workers end, the least busy first, but only as many as new workers can start in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from .claims import NO_GRANT, Grant, NodeProcess, ProcessState, RevisionClaim, WorkerTier


class Replacements:
    """Chooses which workers of replaced revisions end, from the claims and the grants of all revisions."""

    def __init__(self, claims: Sequence[RevisionClaim], grants: dict[str, Grant]) -> None:
        """`grants` are the grants by the keys of the claims. `end` adds to them the workers that end."""
        self._claims, self._grants = claims, grants

    def waited_for(self, drain_s: float) -> Iterator[tuple[str, float]]:
        """Yield each function whose callers wait for the place of an old worker, and the time at which that worker may end."""
        since_s = dict[str, float]()
        for claim in self._claims:
            limit = self._grants.get(claim.key, NO_GRANT).limit
            waits = claim.waiting_since_s < math.inf and limit is not None
            if waits and not claim.retiring and not _proves(claim):
                since_s[claim.function] = min(since_s.get(claim.function, math.inf), claim.waiting_since_s)
        for function, at_s in since_s.items():
            if any(process.calls for _, process in self._old(function)):
                yield function, at_s + drain_s

    def _old(self, function: str) -> Iterator[tuple[RevisionClaim, NodeProcess]]:
        """Yield the workers of replaced revisions, and the workers that drain to make room for the proof of a deploy."""
        own = [claim for claim in self._claims if claim.function == function]
        proving = any(_proves(claim) for claim in own)
        for claim in own:
            for process in claim.processes:
                displaced = proving and not _proves(claim) and process.state is ProcessState.DRAINING
                if claim.retiring or displaced:
                    yield claim, process

    def without_old_calls(self, function: str) -> list[RevisionClaim]:
        """Return the claims as they would be without the old workers that have calls."""
        busy = {(claim.key, process.key) for claim, process in self._old(function) if process.calls}
        return [
            claim._replace(
                processes=tuple(one for one in claim.processes if (claim.key, one.key) not in busy)
            )
            for claim in self._claims
        ]

    def end(self, function: str, without: Mapping[str, Grant]) -> None:
        """End one old worker with calls for each further worker that the function could start without the old calls.
        `without` are the grants for the claims of `without_old_calls`.
        """
        old = list(self._old(function))
        # Fewer busy workers have to end if draining workers without calls give their places back anyway.
        leaving = sum(not process.calls for _, process in old if process.state is ProcessState.DRAINING)
        gained = self._started(function, without) - self._started(function, self._grants) - leaving
        busy = sorted(
            (process.calls, claim.key, number) for number, (claim, process) in enumerate(old) if process.calls
        )
        for _, key, number in busy[: max(0, gained)]:
            grant = self._grants.get(key, NO_GRANT)
            self._grants[key] = grant._replace(end=(*grant.end, old[number][1].key))

    def _started(self, function: str, grants: Mapping[str, Grant]) -> int:
        own = (claim.key for claim in self._claims if claim.function == function and not claim.retiring)
        granted = (grants.get(key, NO_GRANT) for key in own)
        return sum(len(grant.start) + len(grant.wake) for grant in granted)


def _proves(claim: RevisionClaim) -> bool:
    return WorkerTier.PROOF in claim.wants
