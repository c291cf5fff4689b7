"""Calls that wait behind a call that takes longer than was learned, in simulated time."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Literal
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pilotflame.runtime.calls.batching.assignment import late_after_s
from pilotflame.runtime.calls.serving.replica import Replica
from pilotflame.runtime.node.reconciling.revision_workers import RevisionWorkers
from simulated_node import Setup, SimulatedNode
from simulated_processes import CallPlan, Nature, SimulatedProcess
from simulated_time import SimulatedLoop, run_simulated

Kind = Literal["short", "long", "locked"]
MOST_WORKERS, MOST_LONG = 4, 3
SHORT_CALL_S, LONG_CALL_S = 0.0005, 2.0
# Simulated timers fire at most this time late.
LATE_TIMER_S = 0.003
GAPS = st.sampled_from((0.0, 0.0, 0.0004, 0.003, 0.008, 0.015, 0.06, 0.7))
KINDS: st.SearchStrategy[Kind] = st.sampled_from(("short", "short", "short", "long", "locked"))


class Watched:
    """A function with short and long calls. `check` has the conditions that its workers meet at any time."""

    def __init__(self, node: SimulatedNode, batch: int) -> None:
        self.node, self.batch = node, batch
        self.plans: list[CallPlan] = []
        self._since_s = math.inf

    @property
    def workers(self) -> RevisionWorkers:
        live = self.node.function("f").live
        assert live is not None
        return live

    def running(self) -> int:
        """Return the number of long calls that have not ended."""
        plans = self.node.world.plans
        return sum(plans[name].takes_s == LONG_CALL_S for name in self.node.open_calls)

    def call(self, kind: Kind) -> None:
        short = kind == "short" or self.running() == MOST_LONG
        plan = CallPlan(SHORT_CALL_S if short else LONG_CALL_S, locks=kind == "locked" and not short)
        self.plans.append(plan)
        self.node.call("f", plan)

    def check(self) -> bool:
        """Check the present state. The simulated loop calls this whenever nothing is left to do before the next timer."""
        workers, now_s = self.workers, self.node.loop.time()
        replicas, queued = workers.replicas, len(workers.revision.dispatcher.queue)
        late = [one for one in replicas.ready if self.is_late(one, now_s)]
        kept = [one for one in late if one.outstanding.load > one.outstanding.slots and not is_locked(one)]
        # With batches, calls may be queued while a worker is idle, because the worker may wait for a larger batch.
        assert self.batch > 1 or not (queued and replicas.idle), (
            "a call waits in the queue while a worker is idle"
        )
        # If all ready workers have been late for as long as a start takes, another worker must be starting.
        stuck = [
            one
            for one in late
            if self.is_late(one, now_s - workers.revision.dispatcher.durations.activation_s)
        ]
        starts = replicas.starting > 0 or len(late) == MOST_WORKERS
        if kept or (queued and len(stuck) == len(replicas.ready) and not starts):
            since_s = self._since_s = min(self._since_s, now_s)
            assert now_s - since_s <= LATE_TIMER_S, (
                "a call waits at a late worker, or while no other worker starts"
            )
        else:
            self._since_s = math.inf
        return False

    def is_late(self, one: Replica, now_s: float) -> bool:
        if one.outstanding.load < one.outstanding.slots:
            return False
        curve = self.workers.revision.dispatcher.queue.curve
        return one.outstanding.newest_start_s + late_after_s(one, curve) < now_s


def is_locked(one: Replica) -> bool:
    assert isinstance(one.child, SimulatedProcess)
    return any(plan.locks for group, _ in one.child._running.values() for _, plan in group)


async def run(seed: int, calls: list[tuple[float, Kind]], batch: int, loop: SimulatedLoop) -> list[CallPlan]:
    async with asyncio.TaskGroup() as tasks:
        node = SimulatedNode(random.Random(seed), loop, tasks, [], None, {})
        nature = Nature(fork_s=(0.005, 0.02), start_s=(0.01, 0.05))
        nature.batching, nature.prefetch = batch > 1, 32 if batch == 1 else 0
        scale = {"max": MOST_WORKERS, "idle_timeout_s": 1000.0}
        watched = Watched(node, batch)
        with mock.patch("asyncio.to_thread", node.in_thread):
            await node.deploy("f", Setup(scale, nature, batch=batch), check=True)
            for _ in range(5):
                watched.call("short")
                await asyncio.sleep(0.1)
            loop.clock.on_quiet = watched.check
            for gap_s, kind in calls:
                await asyncio.sleep(gap_s)
                watched.call(kind)
            while node.open_calls:
                await asyncio.sleep(0.1)
        loop.clock.on_quiet = lambda: False
        assert not node.faults
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    return watched.plans


@pytest.mark.parametrize("batch", [1, 4])
@given(st.integers(0, 1000), st.lists(st.tuples(GAPS, KINDS), min_size=2, max_size=30))
def test_no_call_waits_where_another_worker_is_idle_or_could_start(
    batch: int, seed: int, calls: list[tuple[float, Kind]]
) -> None:
    loop = SimulatedLoop()
    plans = run_simulated(run(seed, calls, batch, loop), loop)
    assert all(plan.starts == 1 for plan in plans)
