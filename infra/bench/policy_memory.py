"""Waiting times on a node with memory for a part of its functions, by the order in which the node frees memory.

No function steps down before memory is short. LRU takes one function all the way down before the next, greedy dual
(FaasCache, Fuerst and Sharma, ASPLOS 2021) and ours take steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from pilotflame.runtime.scaling.eviction import Gaps, StepDown, cheapest_step
from pilotflame.runtime.scaling.keep_alive import IDLES
from policy_traces import mixed_fleet
from report import Report

SERVICE_S = 0.2
# The share of its memory that a function holds, and its seconds to wake, from READY down. A zygote of 1 GB, weights of 19.
LADDERS: dict[str, tuple[tuple[float, float], ...]] = {
    "READY, LOCAL": ((1.0, 0.0), (0.0, 7.0)),
    "READY, ZYGOTE, LOCAL": ((1.0, 0.0), (0.05, 0.03), (0.0, 5.8)),
}
SHARES = (0.05, 0.2)
JUDGED_SHARE = 0.2


@dataclass
class Function:
    """A function of the node: its size, its rung and its last calls."""

    name: str
    arrivals: Sequence[float]
    size: float
    rung: int
    idle_from_s: float = 0.0
    ready_s: float = 0.0
    calls: int = 0
    seen: bool = False
    clock: float = 0.0
    """Greedy dual's clock at the last call."""
    idles: list[float] = field(default_factory=list)
    gaps: Gaps = field(default_factory=lambda: Gaps(()))


class Node:
    """Replays all functions in the order of their calls."""

    def __init__(
        self, fleet: Sequence[Sequence[float]], rungs: Sequence[tuple[float, float]], share: float
    ) -> None:
        self.rungs = rungs
        sizes = [0.25 * 2 ** (number % 6) for number in range(len(fleet))]
        last = len(rungs) - 1
        pairs = enumerate(zip(fleet, sizes, strict=True))
        self.functions = [Function(str(number), arrivals, size, last) for number, (arrivals, size) in pairs]
        self.budget = max(share * sum(sizes), *sizes)
        self.clock = self.waited_s = self.held = 0.0

    def run(self, free: Callable[[Node, float, Function], Function | None]) -> float:
        """Replay; `free` steps one function down. Return the seconds waited for 1,000 calls."""
        calls = sorted((at_s, number) for number, one in enumerate(self.functions) for at_s in one.arrivals)
        for at_s, number in calls:
            self._call(self.functions[number], at_s, free)
        return 1000 * self.waited_s / len(calls)

    def _call(
        self, function: Function, at_s: float, free: Callable[[Node, float, Function], Function | None]
    ) -> None:
        if at_s > function.idle_from_s:
            if function.seen:
                function.idles = [*function.idles, at_s - function.idle_from_s][-IDLES:]
                function.gaps = Gaps(function.idles)
            wake_s = self.rungs[function.rung][1]
            self.move(function, 0)
            while self.held > self.budget and free(self, at_s, function) is not None:
                pass
            function.ready_s = at_s + wake_s
        function.calls, function.seen = function.calls + 1, True
        self.waited_s += max(0.0, function.ready_s - at_s)
        function.idle_from_s = max(function.idle_from_s, max(at_s, function.ready_s) + SERVICE_S)
        function.clock = self.clock

    def move(self, function: Function, rung: int) -> None:
        self.held += function.size * (self.rungs[rung][0] - self.rungs[function.rung][0])
        function.rung = rung

    def idle(self, now_s: float, called: Function) -> list[Function]:
        """The functions that can step down."""
        last = len(self.rungs) - 1
        return [
            one
            for one in self.functions
            if one is not called and one.rung < last and one.idle_from_s <= now_s
        ]

    def freed(self, function: Function) -> float:
        return function.size * (self.rungs[function.rung][0] - self.rungs[function.rung + 1][0])

    def extra_wake_s(self, function: Function) -> float:
        return self.rungs[function.rung + 1][1] - self.rungs[function.rung][1]


def lru(node: Node, now_s: float, called: Function) -> Function | None:
    chosen = min(node.idle(now_s, called), key=lambda one: one.idle_from_s, default=None)
    if chosen is not None:
        node.move(chosen, len(node.rungs) - 1)
    return chosen


def greedy_dual(node: Node, now_s: float, called: Function) -> Function | None:
    def priority(one: Function) -> float:
        return one.clock + one.calls * node.extra_wake_s(one) / node.freed(one)

    chosen = min(node.idle(now_s, called), key=priority, default=None)
    if chosen is not None:
        node.clock = max(node.clock, priority(chosen))
        node.move(chosen, chosen.rung + 1)
    return chosen


def greedy_dual_anew(node: Node, now_s: float, called: Function) -> Function | None:
    """Greedy dual that counts calls anew once a function holds nothing, as FaasCache does."""
    chosen = greedy_dual(node, now_s, called)
    if chosen is not None and chosen.rung == len(node.rungs) - 1:
        chosen.calls = 0
    return chosen


def ours(node: Node, now_s: float, called: Function) -> Function | None:
    idle = {one.name: one for one in node.idle(now_s, called)}
    step = cheapest_step(
        StepDown(one.name, now_s - one.idle_from_s, node.extra_wake_s(one), node.freed(one), one.gaps)
        for one in idle.values()
    )
    if step is None:
        return None
    node.move(idle[step.name], idle[step.name].rung + 1)
    return idle[step.name]


ORDERS = {
    "lru": lru, "greedy dual": greedy_dual, "greedy dual, anew": greedy_dual_anew, "ours": ours,
}  # fmt: skip


def compare(report: Report, seeds: Sequence[int]) -> None:
    """Replay fleets of 60 functions with memory for a part of them, under each order."""
    head = "".join(f"{name:>19}" for name in ORDERS)
    print(f"{'rungs':24}{'memory':>7}{head}   seconds waited for 1,000 calls, by seed")
    found = [_judge(report, seed) for seed in seeds]
    for name, limit in (("memory_waiting_vs_greedy_dual", 1.2), ("memory_waiting_vs_lru", 0.05)):
        values = [one[name] for one in found]
        report.add(name, max(values), f"worst of {len(seeds)} seeds, best {min(values):.3g}", f"<= {limit}")


def _judge(report: Report, seed: int) -> dict[str, float]:
    fleet, judged = mixed_fleet(seed, functions=60, days=0.5), dict[str, float]()
    for (name, rungs), share in product(LADDERS.items(), SHARES):
        waited = {order: Node(fleet, rungs, share).run(free) for order, free in ORDERS.items()}
        print(f"{name:24}{share:7.0%}" + "".join(f"{seconds:19.1f}" for seconds in waited.values()))
        report.row(seed=seed, rungs=name, share=share, **waited)
        if share == JUDGED_SHARE and "ZYGOTE" in name:
            best = min(waited["greedy dual"], waited["greedy dual, anew"])
            judged["memory_waiting_vs_greedy_dual"] = waited["ours"] / best
            judged["memory_waiting_vs_lru"] = waited["ours"] / waited["lru"]
    return judged
