"""The calls of a simulation: what arrives when, and what became of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One call that somebody makes: `timeout_s` after `at_s` its answer is of no use any more."""

    at_s: float
    timeout_s: float = math.inf
    tenant: str = ""
    priority: int = 3
    cost: float = 1.0
    body: bytes = b""
    patient: bool = False


class CallOutcome(Enum):
    ON_TIME = "on_time"
    LATE = "late"
    """It ran, but its caller had gone before the answer came."""
    REFUSED = "refused"
    """On arrival: it would not have ended in time."""
    DROPPED = "dropped"
    """Later, for the sake of those behind it."""
    EXPIRED = "expired"
    """Its deadline came while it waited."""
    FULL = "full"


class SimulatedAttempt:
    """A call on its way through the queue: what the queue asks of an item, and what became of it."""

    __slots__ = (
        "began_s",
        "call",
        "caller",
        "company",
        "deadline_s",
        "ended_s",
        "outcome",
        "retry_after_s",
        "tries",
    )

    def __init__(self, call: SimulatedCall, caller: int = -1, tries: int = 1) -> None:
        self.call = call
        self.caller = caller
        self.tries = tries
        self.deadline_s = call.at_s + call.timeout_s
        self.company = 0
        self.began_s = 0.0
        self.ended_s = 0.0
        self.outcome: CallOutcome | None = None
        self.retry_after_s: float | None = None

    @property
    def tenant(self) -> str:
        return self.call.tenant

    @property
    def priority(self) -> int:
        return self.call.priority

    @property
    def body(self) -> bytes:
        return self.call.body

    @property
    def timeout_s(self) -> float:
        return self.call.timeout_s

    @property
    def patient(self) -> bool:
        return self.call.patient

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.call.at_s


def poisson(
    rate: float, count: int, *, timeout_s: float = math.inf, tenant: str = "", seed: int = 1
) -> Iterator[SimulatedCall]:
    """So many calls, at random and `rate` a second; each has a body of its own."""
    draw, at_s = random.Random(seed), 0.0  # noqa: S311  a model of chance
    for number in range(count):
        at_s += draw.expovariate(rate)
        yield SimulatedCall(at_s, timeout_s, tenant, body=f"{tenant}{number}".encode())
