"""`make bench-warm`, the closed loop: answers per second for 1 to 128 callers, beside the peers and the bare work."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from dataclasses import dataclass

from load import load_apart
from percentiles import median
from prometheus_client.parser import text_string_to_metric_families
from report import Report
from warm_bare import Bare
from warm_field import rotated, turn
from warm_peers import LIMIT, Contender

CALLERS = (1, 2, 8, 32, 128)
OURS = "pilotflame"


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    rounds: int = 3
    each_s: float = 1.2
    warm_s: float = 0.4
    open_s: float = 5.0

    @staticmethod
    def quick() -> Plan:
        return Plan(rounds=1, each_s=1.0, open_s=3.0)


class Closed:
    """The rounds of one handler, and what they came to."""

    def __init__(self, handler: str, report: Report) -> None:
        self._handler, self._report = handler, report
        self._rates: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self._batches: list[float] = []
        self._shares: list[float] = []
        self.bare_rates: list[float] = []
        self.alone_s: list[float] = []

    def rate(self, name: str, callers: int) -> float:
        """The median over the rounds; 0 for one that is out."""
        return median(self._rates.get((name, callers), [0.0]))

    def run(self, entered: dict[str, Contender], bare: Bare, plan: Plan) -> None:
        """Interleaved rounds; within each, the bare work runs right after our own turn at 32 callers."""
        for number in range(plan.rounds):
            for callers in CALLERS:
                for contender in rotated(entered, number):
                    self._turn(contender, callers, number, plan)
                    if callers == LIMIT and contender.name == OURS:
                        self._bare(bare, number)
            self.alone_s.append(1 / bare.per_second(1, 0.5, workers=1))

    def _turn(self, contender: Contender, callers: int, number: int, plan: Plan) -> None:
        with turn(contender):
            before = batch_counts(contender) if contender.name == OURS else (0.0, 0.0)
            tally = load_apart(
                contender.request, callers=callers, duration_s=plan.each_s, warmup_s=plan.warm_s
            )
            after = batch_counts(contender) if contender.name == OURS else (0.0, 0.0)
        self._rates[contender.name, callers].append(tally.per_second)
        if contender.name == OURS and callers == LIMIT and after[1] > before[1]:
            self._batches.append((after[0] - before[0]) / (after[1] - before[1]))
        self._report.row(
            part="closed", handler=self._handler, round=number, contestant=contender.name, callers=callers,
            **tally.summary(),
        )  # fmt: skip

    def _bare(self, bare: Bare, number: int) -> None:
        batch = max(1, round(self._batches[-1])) if self._batches else LIMIT
        rate = bare.per_second(batch)
        self.bare_rates.append(rate)
        self._shares.append(self._rates[OURS, LIMIT][-1] / rate)
        self._report.row(part="bare", handler=self._handler, round=number, batch=batch, per_second=rate)

    def enter(self, entered: dict[str, Contender]) -> None:
        """Enter the rates of all contestants, and our rate relative to the best of the others."""
        report, handler = self._report, self._handler
        for callers in CALLERS:
            for name in entered:
                report.add(f"{handler}_{name}_rps_{callers}", self.rate(name, callers), "/s")
        report.add(f"{handler}_batch_at_32", median(self._batches))
        report.add(f"{handler}_bare_rps", median(self.bare_rates), "/s")
        target = ">= 0.9" if handler == "minilm" else ""
        report.add(f"{handler}_share_of_bare_model", median(self._shares), "of the bare work", target)
        for callers in CALLERS:
            best = max((self.rate(name, callers) for name in entered if name != OURS), default=0.0)
            name = f"{handler}_rps_vs_best_peer_{callers}"
            if best:
                report.add(name, self.rate(OURS, callers) / best, "x", _TARGETS.get(name, ""))


_TARGETS = {"minilm_rps_vs_best_peer_32": ">= 1.1", "sleep_rps_vs_best_peer_8": ">= 1.15"}


def batch_counts(contender: Contender) -> tuple[float, float]:
    """Return the sum and the count so far of our own gateway's `pilotflame_batch_size`."""
    with urllib.request.urlopen(f"{contender.server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("pilotflame_batch_size_")
        and sample.labels.get("function") == contender.handler
    }
    return found.get("pilotflame_batch_size_sum", 0.0), found.get("pilotflame_batch_size_count", 0.0)
