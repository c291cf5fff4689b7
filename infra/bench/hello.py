"""The cost of a warm call of an empty handler, beside a bare echo (the floor) and LitServe, in interleaved rounds.

Part of `make bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from control import gateway
from load import Request, Tally, load_apart
from percentiles import median
from report import Report
from rounds import rotated
from servers import HERE, Server, ServerError, start_echo, start_litserve

BODY = b'{"name": "x"}'
ANSWER = b'{"message": "Hello, x!"}'
FUNCTION = HERE / "functions" / "hello"
CALLERS = 32
# The duration of one caller and of many callers in each round.
SINGLE_S, LOADED_S = 1.0, 2.0
# The fastest options in one of three sweeps on 2 cores. With two API servers the rate varies from 1,040 to 1,950
# requests/s, because chance decides how many callers each API server gets.
LITSERVE = {"handler": "hello", "workers": 2, "api_servers": 2, "fast_queue": True}


@dataclass(frozen=True)
class Round:
    """The figures of one server in one round. CPU time is of its whole process tree, for each request of many callers."""

    p50_ms: float
    per_second: float
    cpu_us: float


class Subject:
    """A server under measurement, the request that it is sent, and its rounds."""

    def __init__(self, name: str, server: Server, path: str, expect: bytes = ANSWER) -> None:
        self.name, self.server = name, server
        self.rounds: list[Round] = []
        self._request = Request(server.url + path, body=BODY, expect=expect)

    def load(self, callers: int, duration_s: float, warmup_s: float = 0.0) -> Tally:
        tally = load_apart(self._request, callers=callers, duration_s=duration_s, warmup_s=warmup_s)
        if not tally.clean:
            raise ServerError(f"{self.name}, {callers} callers: {tally.summary()}")
        return tally

    def run_round(self) -> Round:
        """Measure one caller, and then many."""
        alone = self.load(1, SINGLE_S, warmup_s=0.2)
        before_s = self.server.cpu_s()
        loaded = self.load(CALLERS, LOADED_S, warmup_s=0.3)
        used_s = self.server.cpu_s() - before_s
        cpu_us = used_s / (loaded.right + loaded.warmup_answers) * 1e6
        self.rounds.append(Round(alone.p_ms(0.5), loaded.per_second, cpu_us))
        return self.rounds[-1]

    def median(self, field: str) -> float:
        return median([getattr(done, field) for done in self.rounds])


@contextmanager
def subjects() -> Iterator[list[Subject]]:
    """Run all three servers at once, so that rounds can be interleaved."""
    with ExitStack() as stack:
        echo = stack.enter_context(start_echo())
        ours, control = stack.enter_context(gateway())
        control.deploy(str(FUNCTION), name="hello")
        litserve = stack.enter_context(start_litserve(LITSERVE, BODY))
        yield [
            Subject("echo", echo, "/", expect=BODY),
            Subject("ours", ours, "/invoke/hello"),
            Subject("litserve", litserve, "/predict"),
        ]


def run_rounds(report: Report, entered: Sequence[Subject], rounds: int) -> None:
    """Warm the servers up, and run interleaved rounds, each of which is a row of the report."""
    for subject in entered:
        subject.load(CALLERS, 1.0)
    for number in range(rounds):
        for subject in rotated(entered, number):
            report.row(round=number, subject=subject.name, **asdict(subject.run_round()))


def measure(report: Report, rounds: int) -> None:
    """Enter the rate and the CPU time of each server, and our ratios to the echo and to LitServe."""
    with subjects() as entered:
        run_rounds(report, entered, rounds)
    echo, ours, litserve = entered
    for subject in entered:
        report.add(f"{subject.name}_rps_{CALLERS}", subject.median("per_second"), "/s")
    for subject in (echo, ours):
        report.add(f"{subject.name}_cpu_us_per_request", subject.median("cpu_us"), "us")
    p50_ms, floor_ms = ours.median("p50_ms"), echo.median("p50_ms")
    report.add("hello_p50_ratio", p50_ms / floor_ms, "x echo", "<= 3")
    report.add("hello_p50_above_echo_ms", p50_ms - floor_ms, "ms", "<= 1")
    rate = ours.median("per_second") / litserve.median("per_second")
    report.add("hello_rps_vs_litserve", rate, "x", ">= 2")
    share = echo.median("cpu_us") / ours.median("cpu_us")
    report.add("echo_cpu_share", share, "of echo's req/cpu-s", ">= 0.55")
