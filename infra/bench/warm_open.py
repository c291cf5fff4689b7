"""`make bench-warm`, the open loop: Poisson arrivals at 0.5, 0.9 and 1.2 of what the handler's work alone can do.

All contestants are sent the same arrivals (a seed for each load). A request counts as on time if its answer is right and
arrives within DEADLINES times the time of a batch of one, counted by the caller from the instant at which it meant to send.
Our gateway gets that deadline in X-Request-Timeout; the others know no such header.
"""

from __future__ import annotations

from dataclasses import replace

from http1 import Request
from load import Tally, load_apart
from report import Report
from warm_closed import OURS, Plan
from warm_field import rotated, turn
from warm_peers import Contender

LOADS = (0.5, 0.9, 1.2)
DEADLINES = 5.0
REFUSED = {429, 503}


def with_deadline(request: Request, deadline_s: float) -> Request:
    """Return the request for our gateway: with its deadline, and with the retry headers of a refusal captured."""
    return replace(
        request,
        headers={**request.headers, "X-Request-Timeout": f"{deadline_s:.4f}"},
        capture=("Retry-After", "retry-after-ms"),
    )


def refused(tally: Tally) -> int:
    return sum(count for status, count in tally.statuses.items() if status in REFUSED)


class Open:
    """The loads of one handler, and what they came to."""

    def __init__(self, handler: str, report: Report, capacity: float, alone_s: float) -> None:
        self._handler, self._report = handler, report
        self._capacity, self._deadline_s = capacity, DEADLINES * alone_s
        self.tallies: dict[tuple[str, float], Tally] = {}
        report.add(f"{handler}_capacity", capacity, "/s")
        report.add(f"{handler}_deadline_ms", self._deadline_s * 1e3, "ms")

    def run(self, entered: dict[str, Contender], plan: Plan) -> None:
        """Run each load once for each contestant."""
        for number, load in enumerate(LOADS):
            for contender in rotated(entered, number):
                ours = contender.name == OURS
                with turn(contender):
                    tally = load_apart(
                        with_deadline(contender.request, self._deadline_s) if ours else contender.request,
                        rate=load * self._capacity, duration_s=plan.open_s, seed=int(load * 10), warmup_s=plan.warm_s,
                    )  # fmt: skip
                self.tallies[contender.name, load] = tally
                self._report.row(
                    part="open", handler=self._handler, load=load, contestant=contender.name,
                    on_time=tally.on_time(self._deadline_s), **tally.summary(),
                )  # fmt: skip

    def enter(self, entered: dict[str, Contender]) -> None:
        """Enter each contestant's p99 and on-time share at each load."""
        for load in LOADS:
            word = str(load).replace(".", "_")
            for name in entered:
                tally = self.tallies[name, load]
                self._report.add(f"{self._handler}_{name}_p99_at_{word}_ms", tally.p_ms(0.99), "ms")
            for name in entered:
                share = self.tallies[name, load].on_time(self._deadline_s)
                self._report.add(f"{self._handler}_{name}_on_time_at_{word}", share)
        answered = self.tallies[OURS, 0.5]
        self._report.add(f"{self._handler}_{OURS}_answered_at_0_5", answered.right / max(1, answered.answers))
        ours = answered.p_ms(0.99)
        peers = [self.tallies[name, 0.5] for name in entered if name != OURS]
        best = min((tally.p_ms(0.99) for tally in peers if tally.right), default=0.0)
        if best:
            self._report.add(f"{self._handler}_p99_vs_best_peer_at_0_5", ours / best, "x", "<= 1")

    def enter_overload(self) -> None:
        """What ours is held to at 1.2: on time, and honest about it."""
        tally = self.tallies[OURS, 1.2]
        told = sum(bool(value) for value in tally.captured["Retry-After"])
        self._report.add("on_time_share_1_2x", tally.on_time(self._deadline_s), "", ">= 0.75")
        self._report.add("refused_share_1_2x", refused(tally) / max(1, tally.answers))
        self._report.add("refusals_with_retry_after", told / max(1, refused(tally)), "", "== 1")

    def retry(self, contender: Contender, plan: Plan) -> None:
        """Repeat the load of 1.2 with callers who retry after a refusal. Enter the share of retries that succeed."""
        with turn(contender):
            tally = load_apart(
                with_deadline(contender.request, self._deadline_s),
                rate=1.2 * self._capacity, duration_s=plan.open_s, seed=7, retry=True,
            )  # fmt: skip
        again = sum(tally.second_statuses.values())
        self._report.row(part="retry", second_statuses=tally.second_statuses, **tally.summary())
        self._report.add("retried", again)
        self._report.add("retry_success", tally.second_statuses.get(200, 0) / max(1, again), "", ">= 0.9")
