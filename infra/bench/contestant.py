"""A contestant of the hello benchmark: a server, the request it is sent, and its figures round by round."""

from __future__ import annotations

import time
from dataclasses import dataclass

from load import Request, Tally, load_apart
from percentiles import median
from servers import Server

HELLO = b'{"name": "x"}'
HELLO_ANSWER = b'{"message": "Hello, x!"}'
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Round:
    """One contestant's figures in one round."""

    p50_ms: float
    p99_ms: float
    per_second: float
    loaded_p99_ms: float
    cpu_us: float  # of the server's whole process tree, per request at full load
    generator_share: float


class WrongAnswersError(Exception):
    """A contestant answered wrongly, or not at all: its figures mean nothing."""


class Contestant:
    """One server under measurement."""

    def __init__(self, name: str, server: Server, path: str, expect: bytes = HELLO_ANSWER) -> None:
        self.name = name
        self.server = server
        self.rounds: list[Round] = []
        self._request = Request(server.url + path, body=HELLO, headers=_HEADERS, expect=expect)

    def warm_up(self, callers: int, duration_s: float) -> None:
        """Bring every process and code path of the server to the state in which it is measured."""
        self._load(callers, duration_s, warmup_s=0.0)

    def idle_share(self, seconds: float = 1.0) -> float:
        """Return the share of one core that the server uses without requests."""
        before_s = self.server.cpu_s()
        time.sleep(seconds)
        return (self.server.cpu_s() - before_s) / seconds

    def run_round(self, callers: int, single_s: float, loaded_s: float) -> Round:
        """One caller, then many; CPU is taken around the second, its warm-up's requests counted with it."""
        alone = self._load(1, single_s, warmup_s=0.2)
        before_s = self.server.cpu_s()
        loaded = self._load(callers, loaded_s, warmup_s=0.3)
        cpu_s = self.server.cpu_s() - before_s
        done = Round(
            p50_ms=alone.p_ms(0.5),
            p99_ms=alone.p_ms(0.99),
            per_second=loaded.per_second,
            loaded_p99_ms=loaded.p_ms(0.99),
            cpu_us=cpu_s / (loaded.right + loaded.warmup_answers) * 1e6,
            generator_share=loaded.generator_share,
        )
        self.rounds.append(done)
        return done

    def median(self, field: str) -> float:
        """The median over the rounds of one of their figures."""
        return median([getattr(done, field) for done in self.rounds])

    def _load(self, callers: int, duration_s: float, warmup_s: float) -> Tally:
        tally = load_apart(self._request, callers=callers, duration_s=duration_s, warmup_s=warmup_s)
        if not tally.clean:
            raise WrongAnswersError(f"{self.name}, {callers} callers: {tally.summary()}")
        return tally
