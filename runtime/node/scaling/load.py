"""Proposes workers for the load of a revision, and keeps the workers that the load needed in the recent window.

The durations of batches predict how long the waiting invocations will take. A worker starts if enough work will be left
for it when it is awake. While durations are unknown, the number of workers is the load (waiting and running
invocations) divided by the concurrency of one worker, as in Knative's pod autoscaler. A lasting load gets workers by
the same rule, so that they start before its invocations have to wait.

A worker stops when the load has not needed it for a whole window. The last worker stops after a time without load,
which has its own setting. This module does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...ground.settings.scale_spec import ScaleSpec
from .seen import Load, Seen
from .table import Cap, Proposal, Rank

# A lasting load that exceeds a number by at most this counts as equal. The load is a difference of large sums, so it has
# rounding errors.
ROUNDING = 1e-3
# An excess of at most this share of one worker's load needs no further worker.
HUNDREDTH = 0.01
# While the other workers cannot end the waiting work in time, each stuck worker raises the need by this number of workers.
# Not more workers start than the waiting invocations can use.
STUCK_WEIGHT = 3
# The load should use at most this share of the workers' concurrency. Above this share, one more worker starts before
# invocations have to wait.
NEAR_LIMIT = 0.8
# A load near the limit is checked again after this time, because no event reports that it lasts.
NEAR_CHECK_S = 1.0
# No event reports that the load has become less. So under load, the need for workers is checked CHECKS times per
# window, but at most once every MIN_RECHECK_S.
CHECKS = 4
MIN_RECHECK_S = 1.0
# The causes of these proposals.
CALLS, BUFFER, MINIMUM, WINDOW, IDLE_TIMEOUT, PLAN = "load", "buffer", "min", "window", "idle_timeout", "plan"


def needed(spec: ScaleSpec, seen: Seen) -> int:
    """Return how many workers the load needs, whatever the limits are."""
    return _by_share(spec, seen.calls) if seen.load is None else _by_work(spec, seen, seen.load)


def buffered(spec: ScaleSpec, seen: Seen) -> int:
    """Return how many workers the load and its buffer want, at most `max`."""
    need = needed(spec, seen)
    return min(spec.max, need + spec.buffer if seen.calls else need)


def wanted(spec: ScaleSpec, seen: Seen) -> int:
    """Return how many workers the load, its buffer and the owner want, within the owner's limits."""
    return max(min(spec.min, spec.max), buffered(spec, seen))


def _by_share(spec: ScaleSpec, load: float) -> int:
    """Return how many workers a load needs if each worker uses its concurrency up to NEAR_LIMIT."""
    # A load of one is typically a single caller, who sends requests in sequence. One worker is enough.
    if load <= 1 + ROUNDING:
        return math.ceil(min(load, 1))
    return math.ceil(load / (spec.concurrency * NEAR_LIMIT) - HUNDREDTH)


def _by_work(spec: ScaleSpec, seen: Seen, load: Load) -> int:
    """Return how many workers are needed to end the waiting invocations in time, and to carry the lasting load."""
    running = math.ceil(seen.in_flight / spec.concurrency)
    # The lasting load may still include the calls of a past burst, so the present calls bound it.
    need = max(running, _by_share(spec, min(load.lasting, seen.calls)))
    if not seen.queued:
        return need
    # The work that will be left when a worker that starts now is awake. From then on, all workers share that work.
    ready = max(0.0, seen.ready - load.stuck)
    left_s = load.work_s - ready * load.wake_s - load.started_s
    stuck = min(load.stuck, seen.ready)
    # The waiting invocations may take as long as the stuck calls. So if work is left, stuck workers raise the need.
    sharing = math.ceil(left_s / load.delay_s + STUCK_WEIGHT * stuck if left_s > 0 else stuck)
    # The waiting invocations cannot run at the stuck workers, however many invocations these take at a time.
    useful = max(
        math.ceil(seen.calls / spec.concurrency), math.ceil(seen.queued / spec.concurrency + load.stuck)
    )
    return max(need, 1, min(sharing, useful))


def sufficient_load(spec: ScaleSpec, seen: Seen) -> float:
    """Return the largest load for which the present workers suffice without a look; infinity if `max` workers are awake."""
    if seen.awake >= spec.max:
        return math.inf
    # Any load needs the workers of the buffer in addition. If there are no other workers, any load needs another look.
    enough = seen.awake - spec.buffer
    near = max(1.0, enough * spec.concurrency * NEAR_LIMIT) if enough > 0 else 0.0
    # While it is unknown whether a load near the limit lasts, the row names a time for another look.
    lasting = seen.load is not None and not seen.queued and 0 < near < seen.in_flight
    return math.inf if lasting else near


def sufficient_queue(spec: ScaleSpec, seen: Seen) -> float:
    """Return the number of waiting invocations up to which the need for workers does not change, so that no look is needed.

    Return -1 if each waiting invocation needs a look.
    """
    load = seen.load
    if load is None or not load.each_s or load.stuck:
        return -1.0
    need = max(1, needed(spec, seen))
    if need + spec.buffer > seen.awake or _by_share(spec, load.lasting) > need:
        return -1.0
    # As in `_by_work`: more work than this would need another worker.
    work_s = need * load.delay_s + seen.ready * load.wake_s + load.started_s
    return math.floor(work_s / load.each_s)


def proposals(spec: ScaleSpec, seen: Seen, now_s: float) -> Iterator[Proposal]:
    """Yield the proposals of the load, of its recent past and of the owner."""
    if seen.calls:
        need = needed(spec, seen)
        # The predicted need counts on the awake workers. If one of them stopped while invocations wait, the need would
        # grow.
        keep = max(1, need, seen.awake if seen.queued else 0)
        yield Proposal(Rank.LOAD, CALLS, need, keep, _next_check_s(spec, seen, now_s))
        if spec.buffer:
            yield Proposal(Rank.AHEAD, BUFFER, need + spec.buffer)
    if spec.min:
        yield Proposal(Rank.OWNER, MINIMUM, spec.min)
    if seen.recent.workers:
        until_s = math.inf if seen.calls or seen.recent.until_s <= now_s else seen.recent.until_s
        yield Proposal(Rank.KEEP, WINDOW, keep=seen.recent.workers, until_s=until_s)
    if (zero_at_s := _zero_at_s(spec, seen)) is not None and zero_at_s > now_s:
        cause = PLAN if spec.scale_to_zero_s == math.inf else IDLE_TIMEOUT
        yield Proposal(Rank.KEEP, cause, keep=1, until_s=zero_at_s)


def caps(spec: ScaleSpec, seen: Seen, now_s: float) -> Iterator[Cap]:
    """Yield two caps: after the idle timeout, only wanted workers stay; after `park_after_s`, idle workers park."""
    if (zero_at_s := _zero_at_s(spec, seen)) is not None and zero_at_s <= now_s:
        yield Cap(IDLE_TIMEOUT, frozenset({Rank.KEEP}), held=0)
    # No worker parks while invocations wait: with fewer awake workers, the invocations would take longer.
    if spec.park_after_s < math.inf and not seen.queued and (seen.idle_since_s or seen.parked):
        due_s = [since_s + spec.park_after_s for since_s in seen.idle_since_s]
        parked = sum(at_s <= now_s for at_s in due_s)
        awake = max(seen.recent_awake.workers, seen.awake - parked)
        ends_s = [seen.recent_awake.until_s] if seen.recent_awake.until_s > now_s else []
        yield Cap(
            "park_after",
            frozenset({Rank.KEEP}),
            awake=awake,
            until_s=min([*due_s[parked:], *ends_s], default=math.inf),
        )


def _zero_at_s(spec: ScaleSpec, seen: Seen) -> float | None:
    """Return when the last idle worker ends; None if there is load, or no idle worker."""
    idle_since_s = (*seen.parked_since_s, *seen.idle_since_s)
    return None if seen.unfinished or not idle_since_s else max(idle_since_s) + spec.scale_to_zero_s


def _next_check_s(spec: ScaleSpec, seen: Seen, now_s: float) -> float:
    """Return when to look at the load again: no event reports that the load has become less, or that it lasts."""
    checks = list[float]()
    if seen.held > max(1, spec.min):
        checks.append(max(spec.scale_down_s / CHECKS, MIN_RECHECK_S))
    if seen.load is not None and seen.awake < spec.max:
        if seen.queued:
            checks.append(seen.load.delay_s)
        elif seen.in_flight > (seen.awake - spec.buffer) * spec.concurrency * NEAR_LIMIT:
            checks.append(NEAR_CHECK_S)
    return now_s + min(checks) if checks else math.inf
