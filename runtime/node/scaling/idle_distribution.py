"""Estimates the distribution of a function's idle times, and finds the cheapest plan for it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from .ladder import Costs, IdlePlan, Step
from .route import PlanRoute

# Idle times outside this range are not distinguished.
SHORTEST_S, LONGEST_S = 0.05, 30 * 86400.0
DECADES_S = tuple(SHORTEST_S * 10**power for power in range(8) if SHORTEST_S * 10**power < LONGEST_S)
QUANTILES = 16
LONGEST_SAMPLES = 32
# The weights, in samples, of the guesses about idle times that were never seen: TAIL_SAMPLES for each of two guesses about
# long periods, PRIOR_SAMPLES for the node-wide prior.
TAIL_SAMPLES, PRIOR_SAMPLES = 4.0, 0.2
# The longest samples (one in LONG_SHARE of all samples, at most LONG_SAMPLES) predict the next long idle time. A
# continuous distribution is fitted to them, because the next long idle time will not repeat an earlier length exactly.
# BEYOND_LONGEST has the edges of the bins beyond the longest sample, as multiples of its length.
LONG_SAMPLES, LONG_SHARE = 16, 4
BEYOND_LONGEST = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# For plans that climb, the shortest samples predict the next short idle time, and HEAD_SAMPLES is the weight of this
# guess in samples. The next idle time may be shorter than the shortest sample, so there are edges of bins before that
# sample. Their distances from the sample are the multiples in BELOW_SHORTEST of the spread of the SHORT_SAMPLES
# shortest samples, and the share LEAST_LEAD of the sample.
HEAD_SAMPLES, SHORT_SAMPLES = 2.0, 8
BELOW_SHORTEST, LEAST_LEAD = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), 0.001
# A plan may step down earlier than the ski-rental schedule only at times that at least this number of samples exceed.
ENOUGH_LONGER = 3
PRIOR_BINS, PRIOR_BINS_PER_DECADE = 31, 4
# Later periods of a function weigh less in the node-wide prior. Otherwise a busy function would outweigh all others.
PRIOR_HALF_LIFE = 10


@dataclass(frozen=True, slots=True)
class Prior:
    """The node-wide prior: a histogram of all functions' idle times, with four bins a decade from SHORTEST_S on."""

    weights: tuple[float, ...] = (0.0,) * PRIOR_BINS

    def learn(self, idle_s: float, known: int) -> Prior:
        """Return the prior after one more idle period of a function with `known` earlier periods."""
        place = math.log10(max(idle_s, SHORTEST_S) / SHORTEST_S) * PRIOR_BINS_PER_DECADE
        weights = list(self.weights)
        weights[min(PRIOR_BINS - 1, int(place))] += 1 / (PRIOR_HALF_LIFE + known)
        return Prior(tuple(weights))

    def cdf(self) -> Callable[[float], float]:
        """Return the cumulative distribution function, which is half the histogram and half log-uniform."""
        total = sum(self.weights)
        even = 1 / PRIOR_BINS
        shares = [0.5 * even + 0.5 * (weight / total if total else even) for weight in self.weights]
        sums = [0.0, *accumulate(shares)]

        def share(time_s: float) -> float:
            if time_s <= SHORTEST_S:
                return 0.0
            place = math.log10(time_s / SHORTEST_S) * PRIOR_BINS_PER_DECADE
            if place >= PRIOR_BINS:
                return 1.0
            index = int(place)
            return sums[index] + (place - index) * shares[index]

        return share


@dataclass(slots=True)
class SharedPrior:
    """The prior that all functions of a node share. It is replaced after each idle period."""

    prior: Prior = field(default_factory=Prior)


@dataclass(frozen=True, slots=True)
class IdleDistribution:
    """A distribution of idle times: the mass of each bin between two edges, in seconds. The masses need not add up to 1."""

    edges: tuple[float, ...]
    masses: tuple[float, ...]
    longer: tuple[int, ...]
    """For each edge, the number of samples that were longer."""


def distribution_of(
    samples: Sequence[float], costs: Costs, prior: Callable[[float], float], *, climbs: bool = False
) -> IdleDistribution:
    """Return the distribution of `samples`, with guesses about long periods and about lengths that were never seen.

    `prior` is the `cdf` of the node's prior. If `climbs`, guess also about short periods: a plan that climbs must be ready
    before the shortest sample.
    """
    ascending = sorted(samples)
    edges = _edges(ascending, costs, climbs=climbs)
    at_most = [bisect.bisect_right(ascending, edge) for edge in edges]
    tail = _pareto(ascending[len(ascending) // 2]) if ascending else lambda _time_s: 0.0
    following = _following(ascending)
    preceding = _preceding(ascending) if climbs else lambda _time_s: 0.0
    guessed = [
        TAIL_SAMPLES * (tail(edge) + following(edge))
        + HEAD_SAMPLES * preceding(edge)
        + PRIOR_SAMPLES * prior(edge)
        for edge in edges
    ]
    masses = tuple(
        at_most[index + 1] - at_most[index] + guessed[index + 1] - guessed[index]
        for index in range(len(edges) - 1)
    )
    return IdleDistribution(tuple(edges), masses, tuple(len(ascending) - count for count in at_most))


def _edges(ascending: list[float], costs: Costs, *, climbs: bool) -> list[float]:
    count = len(ascending)
    found = {0.0, LONGEST_S, *DECADES_S, *(step.offset_s for step in costs.ski_rental)}
    found |= {ascending[count * part // QUANTILES] for part in range(QUANTILES)} if count else set()
    found |= set(ascending[-LONGEST_SAMPLES:])
    found |= {ascending[-1] * factor for factor in BEYOND_LONGEST} if count else set()
    if climbs and count > SHORT_SAMPLES:
        spread_s = ascending[SHORT_SAMPLES] - ascending[0]
        found |= {ascending[0] - spread_s * factor for factor in BELOW_SHORTEST}
        # Without an edge just before the shortest sample, the wide bin that ends at this sample would count as a bin in
        # which the arrival may come at any time.
        found.add(ascending[0] * (1 - LEAST_LEAD))
    return sorted(edge for edge in found if 0 <= edge <= LONGEST_S)


def _pareto(median_s: float) -> Callable[[float], float]:
    return lambda time_s: max(0.0, 1 - median_s / time_s) if time_s > 0 else 0.0


def _following(ascending: list[float]) -> Callable[[float], float]:
    """Return the cumulative distribution function of the next long sample.

    It follows from the excess of the long samples over the longest sample that is not long. The excess counts as
    exponential with an unknown rate. If the rate has a Gamma distribution, the next excess has a Lomax distribution.
    """
    known = min(LONG_SAMPLES, (len(ascending) - 1) // LONG_SHARE)
    if known < 2:
        return lambda _time_s: 0.0
    before_s = ascending[-known - 1]
    beyond_s = sum(sample - before_s for sample in ascending[-known:])

    def share(time_s: float) -> float:
        if time_s < before_s:
            return 0.0
        return 1 - (beyond_s / (beyond_s + time_s - before_s)) ** known if beyond_s else 1.0

    return share


def _preceding(ascending: list[float]) -> Callable[[float], float]:
    """Return the cumulative distribution function of the next short sample: the mirror of `_following`."""
    known = min(LONG_SAMPLES, (len(ascending) - 1) // LONG_SHARE)
    if known < 2:
        return lambda _time_s: 0.0
    after_s = ascending[known]
    before_s = sum(after_s - sample for sample in ascending[:known])

    def share(time_s: float) -> float:
        if time_s >= after_s:
            return 1.0
        return (before_s / (before_s + after_s - time_s)) ** known if before_s else 0.0

    return share


@dataclass(frozen=True, slots=True)
class Strategy:
    """The cheapest way through a distribution. `choices[bin][rung]` is the rung to hold in `bin` if `rung` was held before."""

    distribution: IdleDistribution
    costs: Costs
    choices: tuple[list[int], ...]

    def plan(self, since_s: float = 0.0) -> IdlePlan:
        """Return the plan of an idle period that begins `since_s` seconds after the distribution's time 0."""
        distribution, wakes = self.distribution, self.costs.wakes
        first = min(
            len(distribution.masses) - 1, max(0, bisect.bisect_right(distribution.edges, since_s) - 1)
        )
        rung = self.choices[first][0]
        route = PlanRoute(rung, wakes)
        for index in range(first + 1, len(distribution.masses)):
            following = self.choices[index][rung]
            if following != rung:
                rung = following
                route.reach(rung, distribution.edges[index] - since_s)
        return route.plan()


def cheapest(distribution: IdleDistribution, costs: Costs, *, climbs: bool, guarded: bool = True) -> Strategy:
    """Return the cheapest way through `distribution`, found backwards from its last bin. `climbs` allows steps up.

    If `guarded`, it steps down no earlier than the ski-rental schedule, except at times that enough samples exceed.
    """
    holds, penalties = costs.holds, costs.penalties
    rungs = range(len(holds))
    earliest_s = _earliest(costs) if guarded else [0.0] * len(holds)
    values = [min(penalties[rung:]) for rung in rungs]
    climb_costs = _climb_costs(costs)
    left = 0.0
    choices = list[list[int]]()
    for index in reversed(range(len(distribution.masses))):
        left += distribution.masses[index]
        arriving = distribution.masses[index] / left if left > 0 else 0.0
        start_s = distribution.edges[index]
        paid_s, remaining = (distribution.edges[index + 1] - start_s) * (1 - arriving / 2), 1 - arriving
        held = [
            holds[rung] * paid_s + arriving * penalties[rung] + remaining * values[rung] for rung in rungs
        ]
        known = distribution.longer[index] >= ENOUGH_LONGER
        chosen, values = _descend(held, [known or start_s >= earliest_s[rung] for rung in rungs])
        if climbs:
            _climb(held, climb_costs, chosen, values)
        choices.append(chosen)
    return Strategy(distribution, costs, tuple(reversed(choices)))


def _descend(held: list[float], allowed: list[bool]) -> tuple[list[int], list[float]]:
    """For each rung, return the rung to hold in the bin, and its cost: the cheapest of the rung itself and the lower rungs
    (higher numbers) that are `allowed`. `held` is the cost of holding each rung in the bin.
    """
    chosen, values = list(range(len(held))), held.copy()
    below, least = -1, math.inf
    for rung in reversed(range(len(held))):
        if least < held[rung]:
            chosen[rung], values[rung] = below, least
        if allowed[rung] and held[rung] < least:
            below, least = rung, held[rung]
    return chosen, values


def _climb(
    held: list[float], climbs: Sequence[Sequence[float]], chosen: list[int], values: list[float]
) -> None:
    """From each rung, choose a step up if that is cheaper than the choice so far. `climbs` has the costs of climbs."""
    for rung in range(1, len(held)):
        for upper, cost in enumerate(climbs[rung]):
            if (value := held[upper] + cost) < values[rung]:
                chosen[rung], values[rung] = upper, value


def _climb_costs(costs: Costs) -> list[list[float]]:
    """For each rung, return the extra cost of a climb to each higher rung, compared with staying.

    `PlanRoute` climbs rung by rung.
    """
    holds, wakes = costs.holds, costs.wakes
    return [
        [
            sum((holds[each] - holds[rung]) * (wakes[each + 1] - wakes[each]) for each in range(upper, rung))
            for upper in range(rung)
        ]
        for rung in range(len(holds))
    ]


def _earliest(costs: Costs) -> list[float]:
    """For each rung, return when the ski-rental schedule first stands on it or on a lower rung."""
    earliest = [math.inf] * len(costs.holds)
    for (_, upper), (offset_s, lower) in pairwise((Step(0.0, -1), *costs.ski_rental)):
        for rung in range(upper + 1, lower + 1):
            earliest[rung] = offset_s
    return earliest
