"""The desired state over simulated time: callers, workers that take a while to start, and calls that take a while."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from example_count import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pilotflame.runtime.ground.settings.scale_spec import ScaleSpec
from pilotflame.runtime.node.scaling.desired_state import desired
from pilotflame.runtime.node.scaling.load import wanted
from pilotflame.runtime.node.scaling.recent_load import RecentLoad
from pilotflame.runtime.node.scaling.recent_need import RecentNeed
from pilotflame.runtime.node.scaling.seen import Load, Seen


@dataclass
class Node:
    """A revision whose workers run one call at a time. Times are simulated."""

    spec: ScaleSpec
    exec_s: float
    wake_s: float
    known: bool = True
    now_s: float = 0.0
    queued: int = 0
    running: int = 0
    starting: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    admitted: int = 0
    emptied: int = 0
    answered: int = 0
    starts: int = 0
    stops: int = 0
    on_answer: Callable[[], None] = lambda: None
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Iterable[int] = field(default_factory=itertools.count)
    _ran_s: float = 0.0
    _wake_at_s: float = math.inf
    _need: RecentNeed = field(default_factory=RecentNeed)
    _load: RecentLoad = field(default_factory=RecentLoad)

    @property
    def workers(self) -> int:
        return self.running + len(self.idle) + len(self.starting)

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(iter(self._order)), event))

    def call(self) -> None:
        self.queued += 1
        self.admitted += 1
        self._dispatch()
        self._scale()

    def run_until(self, end_s: float) -> None:
        while True:
            event_s = self._events[0][0] if self._events else math.inf
            if min(event_s, self._wake_at_s) > end_s:
                break
            if self._wake_at_s < event_s:
                self._pass(self._wake_at_s)
                self._scale()
            else:
                when_s, _, event = heapq.heappop(self._events)
                self._pass(when_s)
                event()
        self._pass(end_s)

    def _pass(self, now_s: float) -> None:
        self._ran_s += self.running * (now_s - self.now_s)
        self.now_s = now_s

    def _dispatch(self) -> None:
        while self.queued and self.idle:
            self.queued -= 1
            self.emptied += not self.queued
            self.idle.pop()
            self.running += 1
            self.at(self.now_s + self.exec_s, self._end)

    def _end(self) -> None:
        self.running -= 1
        self.answered += 1
        self.idle.append(self.now_s)
        self.on_answer()
        self._dispatch()
        self._scale()

    def _ready(self) -> None:
        self.starting.pop(0)
        self.idle.append(self.now_s)
        self._dispatch()
        self._scale()

    def _scale(self) -> None:
        seen = self.see()
        row = desired(self.spec, seen, self.now_s)
        start, stop = row.start(seen), row.stop(seen)
        self.starts += start
        self.stops += stop
        for _ in range(start):
            self.starting.append(self.now_s)
            self.at(self.now_s + self.wake_s, self._ready)
        # Stop only idle workers. Busy workers would stop after their calls, which this simulation leaves out.
        del self.idle[:stop]
        self._wake_at_s = row.again_s

    def see(self) -> Seen:
        lasting = self._load.note(self.now_s, self._ran_s, self.queued, self.admitted, self.emptied)
        load = None
        if self.known:
            started_s = sum(min(self.wake_s, self.now_s - asked_s) for asked_s in self.starting)
            load = Load(self.queued * self.exec_s, self.wake_s, started_s, 0.0, lasting)
        ready = self.running + len(self.idle)
        present = Seen(self.queued, self.running, len(self.starting), ready, load=load)
        self._need.note(self.now_s, wanted(self.spec, present))
        recent = self._need.peak(self.now_s, self.spec.scale_down_s)
        idle = tuple(sorted(self.idle))
        return Seen(self.queued, self.running, len(self.starting), ready, idle, load, recent)


def nodes(most_buffer: int = 0) -> st.SearchStrategy[Node]:
    spec = st.builds(
        ScaleSpec,
        max=st.integers(1, 12),
        buffer=st.integers(0, most_buffer),
        scale_to_zero_s=st.floats(0, 120),
        scale_down_s=st.just(60.0),
    )
    return st.builds(Node, spec, exec_s=st.floats(0.001, 3), wake_s=st.floats(0.005, 10), known=st.booleans())


class AnyLoad(RuleBasedStateMachine):
    """Calls at random times, alone and in bursts."""

    @initialize(node=nodes(most_buffer=3))
    def begin(self, node: Node) -> None:
        self.node, self.called = node, 0

    @rule(count=st.integers(1, 50))
    def burst(self, count: int) -> None:
        for _ in range(count):
            self.node.call()
        self.called += count
        assert self.node.workers >= 1

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.node.run_until(self.node.now_s + seconds)

    @invariant()
    def the_limits_hold(self) -> None:
        node = self.node
        assert 0 <= node.workers <= node.spec.max
        assert node.workers or not (node.queued or node.running)

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        node = self.node
        # Run until one worker alone could have answered all calls, and then for as long as an idle worker may stay.
        node.run_until(node.now_s + node.wake_s + self.called * node.exec_s + 1)
        assert node.answered == self.called
        node.run_until(node.now_s + node.spec.scale_to_zero_s + node.wake_s + 1)
        assert node.workers == 0


AnyLoad.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
TestAnyLoad = AnyLoad.TestCase


@settings(max_examples=examples(15), deadline=None)
@given(nodes(), st.integers(1, 15))
def test_a_constant_load_settles(node: Node, callers: int) -> None:
    """Callers who send one request after the other: after some time, no worker starts and none stops."""
    node.on_answer = lambda: node.at(node.now_s, node.call)
    node.spec = replace(node.spec, scale_to_zero_s=60.0)
    # With shorter calls, the test would take too long.
    node.exec_s = max(node.exec_s, 0.1)
    for _ in range(callers):
        node.call()
    node.run_until(70 + 3 * node.wake_s)
    settled = (node.starts, node.stops)
    node.run_until(node.now_s + 100)
    assert (node.starts, node.stops) == settled
    # Each caller has a worker, and at most a fifth of the workers are spare.
    assert min(callers, node.spec.max) <= node.workers <= math.ceil(callers / 0.8)


@settings(max_examples=60, deadline=None)
@given(nodes(), st.integers(2, 200))
def test_a_burst_starts_at_most_one_more_than_it_needs(node: Node, calls: int) -> None:
    node.known = True
    node.spec = replace(node.spec, scale_to_zero_s=60.0)
    for _ in range(calls):
        node.call()
    target_s = max(node.wake_s, 0.1)
    needed = min(node.spec.max, calls, math.ceil(calls * node.exec_s / target_s))
    node.run_until(node.wake_s + calls * node.exec_s + 1)
    assert node.answered == calls
    assert node.starts <= needed + 1


@settings(max_examples=60, deadline=None)
@given(nodes(), st.floats(0.05, 2.0), st.integers(10, 60))
def test_pauses_shorter_than_the_window_end_no_worker_that_is_needed_again(
    node: Node, pause_s: float, rounds: int
) -> None:
    """The same burst comes again and again. Workers start only in the first bursts, and no worker ends between two bursts."""
    node.spec = ScaleSpec(max=node.spec.max, scale_to_zero_s=60.0)
    node.known = False
    size = node.spec.max
    for number in range(rounds):
        for _ in range(size):
            node.call()
        node.run_until(node.now_s + node.exec_s + pause_s + (node.wake_s if not number else 0.0))
        assert node.stops == 0
    assert node.starts <= node.spec.max
