"""Replays calls under keep-alive policies, for `pilotflame simulate --policy`, and tells what each would have cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CodeError
from ..scaling.idle_period import QUIET_S
from ..scaling.ladder import Ladder, Rung
from ..scaling.ladder_simulator import (
    FELT_S,
    Fixed,
    Habits,
    KeepAlivePolicy,
    LadderRun,
    Learned,
    Replay,
    run_together,
    timeout,
)
from ..telemetry.usage import HOUR_S

if TYPE_CHECKING:
    from ..settings.gateway_settings import GatewaySettings

# MiniLM on CPUs, as measured: GB of memory or of disk, and the seconds to wake.
USUAL_RUNGS = ("ready:0.45:0", "zygote:0.1:0.03", "local:0.1disk:5.8")
SERVICE_S = 0.2
POLICIES = ("policy", "fixed:5", "fixed:60", "fixed:600", "always-on")
# Policies that `make bench-policy` compares with, and earlier versions of the command did.
BENCHMARKED = ("hybrid", "optimum")


class ReplayedFunction(NamedTuple):
    """One function: when it was called, how long a call takes, and its ladder with the names of the rungs."""

    arrivals: Sequence[float]
    service_s: float
    ladder: Ladder
    rungs: tuple[str, ...]


Chooser = Callable[[ReplayedFunction], KeepAlivePolicy]


@dataclass(frozen=True)
class PolicyOutcome:
    """What one policy costs all functions together."""

    name: str
    calls: int
    holding: float
    """Money for all rungs. READY is paid while calls run, too."""
    waiting_s: float
    bill: float
    """The money for holding and for waiting."""
    cold_starts: int
    """Idle periods that ended below READY."""
    slow: int
    """Calls that waited longer than FELT_S."""
    waits: Sequence[float]
    """Of the calls that waited, ascending."""
    rung_s: dict[str, float]

    def wait_s(self, share: float) -> float:
        """Return a percentile of the waiting of all calls."""
        number = min(self.calls - 1, int(share * self.calls)) - (self.calls - len(self.waits))
        return self.waits[number] if number >= 0 else 0.0

    def figures(self) -> dict[str, Any]:
        shares = {"wait_p50_s": 0.5, "wait_p95_s": 0.95, "wait_p99_s": 0.99, "wait_max_s": 1.0}
        return {
            "policy": self.name, "bill": self.bill, "holding": self.holding, "waiting_s": self.waiting_s,
            "cold_starts": self.cold_starts, "slow_calls": self.slow,
            **{name: self.wait_s(share) for name, share in shares.items()}, "rung_s": self.rung_s,
        }  # fmt: skip


def replay(functions: Sequence[ReplayedFunction], policy: str) -> PolicyOutcome:
    """Replay all functions under the policy of this name, as "policy" or "fixed:60:zygote". Raise CodeError."""
    # Live, an idle period begins only after a moment without work, so the policy's worker stays for that long.
    quiet_s = QUIET_S if policy in ("policy", "envelope") else 0.0
    return _replay(functions, *_chooser(policy), quiet_s)


def _chooser(policy: str) -> tuple[str, Chooser]:
    """Return the policy's title, and how to make one for a function. Raise CodeError."""
    kind, _, rest = policy.partition(":")
    if kind == "policy" and not rest:
        habits = Habits()
        return "the policy", lambda one: Learned(one.ladder, habits)
    if kind == "envelope" and not rest:
        return "envelope alone", lambda one: Fixed(one.ladder.costs().envelope)
    if kind == "always-on" and not rest:
        return "always on", lambda one: Fixed(timeout(math.inf, 0))
    if kind == "fixed":
        after, _, rung = rest.partition(":")
        after_s = _timeout(policy, after)
        return f"fixed {after_s:g} s{f' to {rung}' if rung else ''}", partial(_fixed, after_s, rung)
    remedy = f"Give all, or of: {', '.join(POLICIES)}, envelope."
    if kind in BENCHMARKED:
        remedy += f" `make bench-policy` in the source tree compares with {kind}."
    raise CodeError(f"There is no policy {policy!r}.", remedy=remedy)


def _timeout(policy: str, text: str) -> float:
    try:
        after_s = float(text)
    except ValueError:
        after_s = math.nan
    if not 0 <= after_s < math.inf:
        raise CodeError(
            f"{policy!r} has no timeout.", remedy="Write seconds, as fixed:60, or fixed:60:zygote."
        )
    return after_s


def _fixed(after_s: float, rung: str, one: ReplayedFunction) -> KeepAlivePolicy:
    return Fixed(timeout(after_s, _floor(one, rung)))


def _floor(one: ReplayedFunction, rung: str) -> int:
    """Return the number of a rung, by default the lowest."""
    if not rung:
        return len(one.rungs) - 1
    if rung not in one.rungs:
        raise CodeError(f"The ladder has no rung {rung!r}.", remedy=f"It has {', '.join(one.rungs)}.")
    return one.rungs.index(rung)


def _replay(
    functions: Sequence[ReplayedFunction], name: str, choose: Chooser, quiet_s: float
) -> PolicyOutcome:
    replays = [Replay(one.arrivals, one.service_s, one.ladder, choose(one), quiet_s) for one in functions]
    runs = run_together(replays)
    whole, rung_s, holding, bill = LadderRun(), dict[str, float](), 0.0, 0.0
    for one, found in zip(functions, runs, strict=True):
        ready_per_s = one.ladder.rungs[0].hold_per_s
        held = found.held + found.busy_s * ready_per_s
        holding, bill = holding + held, bill + held + found.waited_s * one.ladder.wait_per_s
        for rung, seconds in zip(one.rungs, found.rung_s, strict=True):
            rung_s[rung] = rung_s.get(rung, 0.0) + seconds
        rung_s[one.rungs[0]] += found.busy_s
        whole += found
    return PolicyOutcome(
        name, whole.requests, holding, whole.waited_s, bill, whole.woken, whole.felt, sorted(whole.waits), rung_s
    )  # fmt: skip


# -- ladders


def read_ladder(texts: Sequence[str], prices: GatewaySettings) -> tuple[Ladder, tuple[str, ...]]:
    """Return a ladder and the names of its rungs from texts such as "zygote:0.1:0.03". Raise CodeError."""
    names, rungs = list[str](), list[Rung]()
    for text in texts:
        parts = text.split(":")
        try:
            name, hold, wake = parts
            rungs.append(Rung(sum(_price(term, prices) for term in hold.split("+")), float(wake)))
            names.append(name)
        except ValueError:
            remedy = "Write NAME:HOLD:WAKE_S, as zygote:0.1:0.03; HOLD in GB, as 0.1, 16disk, or 1gpu+18."
            raise CodeError(f"{text!r} is no rung.", remedy=remedy) from None
    return make_ladder(rungs, prices.price_waiting_s), tuple(names)


def make_ladder(rungs: Sequence[Rung], waiting_s: float) -> Ladder:
    """Return a ladder. Raise CodeError if the rungs do not descend from READY."""
    finite = all(0 <= number < math.inf for rung in rungs for number in rung)
    try:
        if finite and len(rungs) > 1:
            return Ladder(tuple(rungs), waiting_s)
    except ValueError:
        pass
    remedy = "Give READY first, with 0 s, then two or more rungs in the order of their seconds to wake."
    raise CodeError("The rungs are no ladder.", remedy=remedy)


def _price(term: str, prices: GatewaySettings) -> float:
    """Return what a second of holding costs."""
    for unit, per_hour in (
        ("disk", prices.price_disk_gb_hour), ("gpu", prices.price_device_hour), ("", prices.price_memory_gb_hour),
    ):  # fmt: skip
        if term.endswith(unit):
            return float(term.removesuffix(unit)) * per_hour / HOUR_S
    raise ValueError(term)


SLOW_TITLE = f"over {FELT_S * 1e3:.0f} ms"
