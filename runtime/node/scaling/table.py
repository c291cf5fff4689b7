"""Defines the desired state of a revision: proposals of workers, caps on proposals, and the row that follows from both.

Mechanisms yield proposals and caps. A proposal *wants* a number of workers: missing workers start. It *keeps* a number
of workers: present workers stay. The band between both numbers is the hysteresis, so no other state is remembered. A
cap bounds the proposals of named ranks. `combine` takes minima and maxima only, so the order of mechanisms is
irrelevant, and a cap never raises a number. This module does no I/O and reads no clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from ...ground.telemetry.rung_name import RungName
from .seen import Seen


class Rank(IntEnum):
    """The class of a proposal. Caps name the classes that they bound."""

    KEEP = 0
    """Workers that stay for a while although nothing needs them: the plan, the window, the idle timeout."""
    AHEAD = 1
    """Workers that are wanted before calls arrive, by warm-ups, schedules and the buffer."""
    LOAD = 2
    """Workers that the waiting and running calls need."""
    OWNER = 3
    """`scale.min`."""
    PROOF = 4
    """The first worker of a revision that is deployed: it shows that workers of the revision start."""


EVERY = frozenset(Rank)


class Proposal(NamedTuple):
    """How many workers a mechanism asks for."""

    rank: Rank
    cause: str
    want: int = 0
    """This number of workers should be awake. Parked workers wake, and missing workers start."""
    keep: int = 0
    """Up to this number of workers may stay, awake or parked. It is at least `want`."""
    until_s: float = math.inf
    """When the proposal changes although no event occurs."""

    def left(self, now_s: float) -> str:
        """Return how long the proposal still lasts, as " for 12 s". Return "" if it has no end, and for Rank.LOAD, because
        the load may last longer than `until_s`.
        """
        return "" if self.rank is Rank.LOAD else _for_s(self.until_s - now_s)


class Cap(NamedTuple):
    """A bound on the proposals of some ranks."""

    cause: str
    on: frozenset[Rank]
    held: float = math.inf
    """At most this number of workers stay."""
    awake: float = math.inf
    """At most this number of workers stay awake. The others park, unless a proposal wants them awake."""
    starts: float = math.inf
    """At most this number of further workers start."""
    until_s: float = math.inf
    """When the cap changes although no event occurs. `combine` uses it only if the cap refuses a start, or may park a
    worker. Before a cap that begins later, its mechanism yields a proposal of KEEP that lasts until then."""


class Aim(IntEnum):
    """What happens to a process."""

    END = 0
    KEEP = 1
    """A present process stays, and a missing process is not launched."""
    WANT = 2
    """A missing process is launched."""


class AtRest(NamedTuple):
    """What a revision should hold beside its workers."""

    zygote: Aim = Aim.KEEP
    standby: Aim = Aim.KEEP
    weights: RungName = RungName.READY
    """READY: workers need the fetched weights. RESIDENT: the cache may evict them. LOCAL: they leave the memory."""
    again_s: float = math.inf
    """When a standby is wanted although calls run."""


class Row(NamedTuple):
    """How many workers a revision should have, and why; and what it should hold beside them."""

    awake: int
    held: int
    """The number of workers that should be awake or parked."""
    wanted: tuple[Proposal, ...] = ()
    """The proposals that want workers, reduced by the caps, the highest rank first."""
    kept: tuple[Proposal, ...] = ()
    """The proposals that let more workers stay than they want, after the caps."""
    again_s: float = math.inf
    """When to look again although no event occurs."""
    most: int = sys.maxsize
    """The number of workers that no proposal can exceed."""
    capped: str = ""
    """The cause of the cap that refuses the most workers of a proposal; "" without such a cap."""
    refused: int = 0
    """The number of wanted workers that the cap `capped` refuses."""
    refused_until_s: float = math.inf
    """When the cap `capped` ends although no event occurs."""
    parks: str = ""
    """The cause of the cap that lets workers park; "" without such a cap."""
    rest: AtRest = AtRest()

    @property
    def wants(self) -> dict[Rank, int]:
        """How many workers each class of proposals wants awake."""
        wants = dict[Rank, int]()
        for proposal in self.wanted:
            wants[proposal.rank] = max(wants.get(proposal.rank, 0), proposal.want)
        return wants

    def start(self, seen: Seen) -> int:
        """Return the number of missing workers. Parked workers wake before other workers start."""
        return max(0, self.awake - seen.awake)

    def stop(self, seen: Seen) -> int:
        """Return how many workers end: first parked workers, then ready workers. A starting worker cannot be stopped.

        While workers are missing, no worker ends: parked workers wake first, and the next look stops the parked workers
        that are left. A worker with calls never ends in place of a starting worker: the starting worker ends when it is
        ready.
        """
        surplus = 0 if self.start(seen) else seen.held - self.held
        free = seen.parked + len(seen.idle_since_s)
        return max(0, min(surplus, max(free, surplus - seen.starting), seen.ready + seen.parked))

    def park(self, seen: Seen) -> int:
        """Return how many idle workers park after `stop` workers have ended."""
        if self.start(seen):
            return 0
        stopping = max(0, self.stop(seen) - seen.parked)
        idle = len(seen.idle_since_s) - stopping
        return max(0, min(seen.awake - stopping - self.awake, idle))

    def reasons(self, now_s: float) -> Iterator[str]:
        """Yield in words why there should be this number of workers, and for how long where the time is known."""
        for proposal in self.wanted:
            yield f"{proposal.cause} wants {proposal.want}{proposal.left(now_s)}"
        for proposal in self.kept:
            yield f"{proposal.cause} lets {proposal.keep} stay{proposal.left(now_s)}"
        if self.capped:
            yield f"{self.capped} refuses {self.refused}{_for_s(self.refused_until_s - now_s)}"
        if self.parks:
            yield f"{self.parks} lets them park"

    def causes(self, seen: Seen, start: int) -> Iterator[tuple[Proposal, int]]:
        """Yield why the next `start` workers start: the proposals by descending rank, each with a number of starts."""
        number, last = seen.awake, seen.awake + start
        for proposal in self.wanted:
            if (count := min(proposal.want, last) - number) > 0:
                yield proposal, count
                number += count


def _for_s(seconds: float) -> str:
    if not 0 < seconds < math.inf:
        return ""
    return f" for {seconds:.0f} s" if seconds >= 10 else f" for {seconds:.1f} s"


class _Bound(NamedTuple):
    """The bounds that the caps set for one proposal."""

    held: float
    awake: float
    starts: float
    until_s: float
    """The earliest end of the caps that refuse workers of the proposal."""
    cut: tuple[float, str, float]
    """For the cap that refuses the most workers: their number, the cause of the cap, and the end of the cap."""


NO_CUT = (0.0, "", math.inf)


def _bound(proposal: Proposal, caps: Iterable[Cap], there: int) -> _Bound:
    held = awake = starts = until_s = math.inf
    cut = NO_CUT
    for cap in caps:
        if proposal.rank in cap.on:
            held, awake, starts = min(held, cap.held), min(awake, cap.awake), min(starts, cap.starts)
            missing = proposal.want - min(cap.held, there + cap.starts)
            if missing > 0:
                until_s, cut = min(until_s, cap.until_s), max(cut, (missing, cap.cause, cap.until_s))
    return _Bound(held, awake, starts, until_s, cut)


def combine(proposals: Iterable[Proposal], caps: Iterable[Cap], seen: Seen) -> Row:
    """Return the row: the largest numbers of the proposals, after the caps on their ranks."""
    bounds, wanted, kept = tuple(caps), list[Proposal](), list[Proposal]()
    want = keep = keep_awake = 0
    cut, there, present, lasting_until_s = NO_CUT, seen.awake, seen.held, math.inf
    again_s = min([cap.until_s for cap in bounds if cap.awake < math.inf], default=math.inf)
    for proposal in proposals:
        held, awake, starts, until_s, lost = _bound(proposal, bounds, there)
        cut, again_s = max(cut, lost), min(again_s, until_s)
        wants = int(min(proposal.want, held, there + starts))
        keeps = int(min(max(proposal.keep, proposal.want), held))
        if wants:
            wanted.append(proposal if wants == proposal.want else proposal._replace(want=wants))
            again_s = min(again_s, proposal.until_s)
        elif keeps:
            lasting_until_s = min(lasting_until_s, proposal.until_s)
        if keeps > wants and proposal.keep > proposal.want:
            kept.append(proposal._replace(want=wants, keep=keeps))
        want, keep = max(want, wants), max(keep, keeps)
        keep_awake = max(keep_awake, int(min(keeps, max(awake, wants))))
    target = min(max(present, want), max(want, keep))
    if target > want:
        # The end of a proposal that only keeps workers may change the row.
        again_s = min(again_s, lasting_until_s)
    stay_awake = min(max(there, want), max(want, keep_awake), max(want, target))
    parking = min(((cap.awake, cap.cause) for cap in bounds), default=(math.inf, ""))
    return Row(
        awake=stay_awake,
        held=target,
        wanted=_strongest_first(wanted),
        kept=_strongest_first(kept),
        again_s=again_s,
        most=int(
            min([cap.held for cap in bounds if cap.on == EVERY and cap.held < math.inf], default=sys.maxsize)
        ),
        capped=cut[1],
        refused=int(cut[0]),
        refused_until_s=cut[2],
        parks=parking[1] if stay_awake < target and parking[0] < math.inf else "",
    )


def _strongest_first(proposals: list[Proposal]) -> tuple[Proposal, ...]:
    """Return each proposal once, in an order that does not depend on the order of the mechanisms."""
    if len(proposals) < 2:
        return tuple(proposals)
    return tuple(sorted(set(proposals), key=lambda one: (-one.rank, -one.want, -one.keep, *one[1:])))
