"""Keeps the latest decisions about one function: what was started, stopped or moved to another rung, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

from .rung_name import RungName

# The most decisions of a function that wait in memory until they are stored. The oldest decisions are dropped.
MAX_DECISIONS = 1000
# How many decisions stay in memory when they are stored. A decision takes up to a kilobyte, and a gateway may have
# thousands of functions.
KEPT = 10
_COOLING = ("lose", "stop", "end", "park", "step_down", "evict", "pause")


class DecisionRecord(NamedTuple):
    """One decision of the gateway about a function."""

    at: float
    """When it was made, in Unix seconds."""
    action: str
    """The action: "start", "stop", "end", "park", "wake", "expect", "prewarm", "step_down", "step_up", "evict",
    "refuse", "budget", "fail", "lose", "pause" or "resume".
    """
    cause: str
    """The signal or the rule that caused the decision, such as "load", "idle", "warmup" or "schedule"."""
    figures: Mapping[str, float]
    """The numbers on which the decision was based, by name."""


class Decisions:
    """The latest decisions about one function, the oldest first."""

    def __init__(self) -> None:
        self._kept: deque[DecisionRecord] = deque(maxlen=MAX_DECISIONS)
        self._noted = 0
        self.cooled: DecisionRecord | None = None
        """The latest decision after which the function used less memory than before; None if there is none since the gateway's start."""

    def note(self, action: str, cause: str, **figures: float) -> DecisionRecord:
        """Keep and return a decision that is made now."""
        decision = DecisionRecord(time.time(), action, cause, figures)
        self._kept.append(decision)
        self._noted += 1
        if action in _COOLING:
            self.cooled = decision
        return decision

    def since(self, at: float) -> list[DecisionRecord]:
        """Return the decisions that were made at `at`, in Unix seconds, or later."""
        return [decision for decision in self._kept if decision.at >= at]

    @property
    def pending(self) -> bool:
        """True if there is something that `take` has not returned."""
        return self._noted > 0

    def take(self) -> list[DecisionRecord]:
        """Return the decisions that no call has returned before, to be stored. The last KEPT decisions stay in memory,
        too.
        """
        count, self._noted = min(self._noted, len(self._kept)), 0
        taken = list(self._kept)[-count:] if count else []
        while len(self._kept) > KEPT:
            self._kept.popleft()
        return taken


# -- in words

# The candidate policies of the keep-alive policy, by their number in the figure `expert`.
_EXPERTS = {
    0: "no habit is known", 1: "by its last 1024 idle times", 2: "by its last 32 idle times",
    3: "by its last 128 intervals", 4: "by its last 32 intervals",
}  # fmt: skip

# Phrases for causes. Other causes appear as they are.
_CAUSES = {
    "warmup": "a call asked for it", "schedule": "the schedule asks for it", "plan": "the keep-alive policy",
    "pressure": "memory is short", "rest_mb": "functions without workers held more than rest_mb", "unused": "it starts fast and was not called", "budget": "the budget", "min": "scale.min", "buffer": "scale.buffer", "predicted": "a call is expected",
    "upstream": "the function that comes before it was called", "backlog": "messages wait in its queue",
    "refused": "a caller could not wait for a start", "max_workers": "all functions together may have no more",
    "owner_limit": "the functions of its owner may have no more", "gpus": "the GPUs have no room",
    "paused": "its owner has paused it", "retired": "its revision was replaced or deleted",
    "elsewhere": "calls at other gateways need the other workers of scale.max",
    "replaced": "other calls had waited for its place since its revision was replaced", "shutdown": "the gateway shut down",
}  # fmt: skip
_BUDGET = {"within": "is not used up", "warned": "is nearly used up", "exhausted": "is used up"}
# Phrases for causes that begin with a kind of signal. The rest of the cause identifies the signal and replaces {}.
_SIGNALS = {
    "schedule": "the schedule {} asks for it", "upstream": "{} was called", "hook": "{} asked for it",
}  # fmt: skip
_RUNGS = {
    RungName.READY: "a ready worker", RungName.ZYGOTE: "a zygote alone", RungName.LOCAL: "files alone",
    RungName.RESIDENT: "weights in memory alone",
}  # fmt: skip
NUMBERED_RUNGS = tuple(_RUNGS)
"""The rungs, by their numbers in decisions. Stored decisions have these numbers, so a rung must keep its number."""


def seconds(value: float) -> str:
    """Return a time as text: 12.3 ms, 4.2 s, 0:12:30."""
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.1f} s" if abs(value) < 600 else str(timedelta(seconds=round(value)))


# Formats of figures with their units, by the end of the figure's name. The first end that fits is removed from the name.
_UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_per_hour", lambda value: f"{value:.4g} an hour"),
    ("_per_s", lambda value: f"{value:.3g} a second"),
    ("_bytes", lambda value: f"{value / 1e6:.1f} MB"),
    ("_mb", lambda value: f"{value:.1f} MB"),
    ("_ms", lambda value: f"{value:.1f} ms"),
    ("_s", seconds),
    ("_share", lambda value: f"{value:.0%}"),
)


_FIGURES = {"work_s": "the calls need", "wake_s": "a start takes", "lasting": "load of the last seconds"}


def describe(decision: DecisionRecord) -> str:
    """Return a decision in plain words, with all its figures. An action, cause or figure without a phrase appears by
    its name.
    """
    left = dict(decision.figures)
    said = _WORDS.get(decision.action, _anything)(decision, left)
    rest = [_figure(name, value) for name, value in left.items()]
    if not rest:
        return said
    return f"{said}{', ' if ': ' in said else ': '}{', '.join(rest)}"


def _figure(name: str, value: float) -> str:
    for end, unit in _UNITS:
        if name.endswith(end):
            return f"{_FIGURES.get(name) or name.removesuffix(end).replace('_', ' ')} {unit(value)}"
    return f"{_FIGURES.get(name) or name.replace('_', ' ')} {value:.6g}"


def _count(count: float, noun: str) -> str:
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def _reason(cause: str) -> str:
    kind, _, which = cause.partition(" ")
    if which and kind in _SIGNALS:
        return _SIGNALS[kind].format(which)
    return _CAUSES.get(cause, cause.replace("_", " "))


def _started(decision: DecisionRecord, left: dict[str, float]) -> str:
    workers = _count(left.pop("workers", 1), "worker")
    waited, ready = left.pop("queued", 0.0), left.pop("ready", 0.0)
    state = f"{_count(waited, 'invocation')} waited, {_count(ready, 'worker')} ready"
    state = ", ".join([state, *_state(left)])
    if decision.cause == "load":
        return f"started {workers}: {state}"
    return f"started {workers} ahead of calls, {_reason(decision.cause)}: {state}"


def _stopped(decision: DecisionRecord, left: dict[str, float]) -> str:
    workers, ready = left.pop("workers", 1), left.pop("ready", None)
    said = f"stopped {_count(workers, 'worker')}"
    if decision.cause != "idle":
        said += f", {_reason(decision.cause)}"
    elif "idle_s" in left:
        said += f" after {seconds(left.pop('idle_s'))} idle"
    else:
        said += " without work"
    facts = [] if ready is None else [f"{_count(ready, 'worker')} had been ready"]
    if "recent" in left:
        facts.append(f"{_count(left.pop('recent'), 'worker')} needed lately")
    return ": ".join([said, ", ".join(facts + _state(left))]).removesuffix(": ")


def _ended(decision: DecisionRecord, left: dict[str, float]) -> str:
    workers, calls = _count(left.pop("workers", 1), "worker"), _count(left.pop("calls", 0), "running call")
    state = ", ".join(_state(left))
    return f"ended {workers} with {calls}, {_reason(decision.cause)}{state and f': {state}'}"


def _parked(decision: DecisionRecord, left: dict[str, float]) -> str:
    freed = left.pop("freed_bytes", 0.0)
    cause = f", {_reason(decision.cause)}" if decision.cause != "idle" else ""
    return f"a worker was parked{cause}: it gave {freed / 1e6:.1f} MB of device memory back"


def _woken(_decision: DecisionRecord, left: dict[str, float]) -> str:
    workers, waiting = _count(left.pop("workers", 1), "parked worker"), left.pop("queued", 0.0)
    return f"woke {workers}: {_count(waiting, 'invocation')} waited"


def _state(left: dict[str, float]) -> list[str]:
    """Return phrases for the waiting and running invocations and the starting workers at that time. Leave out zeros."""
    calls, words = "invocation", {"queued": "waiting", "in_flight": "running"}
    found = [
        f"{_count(count, calls)} {word}" for name, word in words.items() if (count := left.pop(name, 0.0))
    ]
    starting = left.pop("starting", 0.0)
    return [*found, f"{_count(starting, 'worker')} already starting"] if starting else found


def _moved(decision: DecisionRecord, left: dict[str, float]) -> str:
    """Return the sentence for a step on the ladder. `rung` is the number of the new rung."""
    rungs, verbs = NUMBERED_RUNGS, {"step_up": "went up to", "evict": "was evicted to"}
    number = left.pop("rung", None)
    known = number is not None and 0 <= number < len(rungs)
    rung = _RUNGS[rungs[int(number or 0)]] if known else "another rung"
    said = f"{verbs.get(decision.action, 'went down to')} {rung}"
    if "idle_s" in left:
        said += f" after {seconds(left.pop('idle_s'))} idle"
    said += f", {_reason(decision.cause)}"
    if (expert := left.pop("expert", None)) is not None:
        said += f" ({_EXPERTS.get(int(expert), f'expert {expert:.0f}')})"
    facts = [words(left.pop(name)) for name, words in _MOVES.items() if name in left]
    return ": ".join([said, ", ".join(facts)]) if facts else said


# Phrases for the figures of a step.
_MOVES: dict[str, Callable[[float], str]] = {
    "freed_bytes": lambda value: f"it held {value / 1e6:.1f} MB",
    "hold_per_hour": lambda value: f"this costs {value:.3g} an hour",
    "saved_per_hour": lambda value: f"{abs(value):.3g} {'less' if value >= 0 else 'more'} than before",
    "wake_s": lambda value: f"the next call waits {seconds(value)}",
    "extra_wake_s": lambda value: f"the next call waits {seconds(value)} longer",
    "calls_per_s": lambda value: f"{value:.3g} calls a second are expected",
    "expected_in_s": lambda value: f"by habit it comes in {seconds(value)}",
    "periods": lambda value: f"learned from {_count(value, 'idle period')}",
}


def _prewarmed(decision: DecisionRecord, left: dict[str, float]) -> str:
    if "used" not in left:
        return _anything(decision, left)
    use = "was used" if left.pop("used") else "was not used"
    said = f"a worker that was started ahead of calls ({_reason(decision.cause)}) {use}"
    return f"{said}: it was ready for {seconds(left.pop('ready_s'))}" if "ready_s" in left else said


def _expected(decision: DecisionRecord, left: dict[str, float]) -> str:
    return f"expects a call, because {_reason(decision.cause)}"


def _refused(decision: DecisionRecord, left: dict[str, float]) -> str:
    workers = _count(left.pop("workers"), "worker") if "workers" in left else "a worker"
    return f"did not start {workers}, {_reason(decision.cause)}"


def _budgeted(decision: DecisionRecord, left: dict[str, float]) -> str:
    return f"today's budget {_BUDGET.get(decision.cause, decision.cause)}"


def _failed(decision: DecisionRecord, left: dict[str, float]) -> str:
    row, delay = _count(left.pop("failures", 1), "failure"), seconds(left.pop("delay_s", 0.0))
    return f"a worker did not start, {_reason(decision.cause)}: {row} in a row, and without a call the next start waits {delay}"


def _lost(decision: DecisionRecord, left: dict[str, float]) -> str:
    return f"lost a worker with {_count(left.pop('calls', 0), 'running call')}, which ended with {decision.cause}"


def _by_owner(decision: DecisionRecord, _left: dict[str, float]) -> str:
    return f"was {decision.action}d by its owner"


def _anything(decision: DecisionRecord, left: dict[str, float]) -> str:
    return f"{decision.action.replace('_', ' ')}, {_reason(decision.cause)}"


_WORDS: dict[str, Callable[[DecisionRecord, dict[str, float]], str]] = {
    "start": _started, "stop": _stopped, "step_down": _moved, "step_up": _moved, "evict": _moved,
    "refuse": _refused, "prewarm": _prewarmed, "expect": _expected, "budget": _budgeted,
    "end": _ended, "park": _parked, "wake": _woken, "pause": _by_owner, "resume": _by_owner, "fail": _failed, "lose": _lost,
}  # fmt: skip
