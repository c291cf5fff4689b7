"""Random histories of a simulated node, and what must hold in each of them (history_checks.py).

python tests/histories.py SEED    prints one history
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from history_checks import SLACK_S, Broken, Checks
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.reconciling import reconciler
from pilotflame.runtime.node.scaling import allocation
from pilotflame.runtime.node.scaling.placement import Gpu
from simulated_node import Setup, SimulatedNode
from simulated_processes import CallPlan, Nature, SimulatedProcess, SimulatedSource
from simulated_time import SimulatedLoop, run_simulated

OWNERS = ("", "ann", "bob")
NAMES = ("a", "b", "c", "d", "e")
# Times between events, in seconds.
GAPS_S = (0.0, 0.0, 0.0, 0.01, 0.1, 0.1, 1.0, 1.0, 5.0, 20.0, 70.0)
# CALLS_S: all calls end within this time, because of their time limits. REST_S: after this time, all windows,
# timeouts and plans have ended.
CALLS_S, REST_S = 4 * 600.0, 32 * 86400.0
# A constant load lasts for the sum of both times. During STEADY_S, no worker may start or stop.
SETTLES_S, STEADY_S = 200.0, 100.0
LAST_LINES = 60


class HistoryFigures(NamedTuple):
    """The figures of a history."""

    calls: int
    actions: int
    looks: int
    steps_to_rest: int
    """How many workers started, stopped, parked or woke after the last call had ended."""
    most_runs: int
    longest_wait_s: float


class HistoryFailed(AssertionError):
    """A history in which a property does not hold."""


class History:
    """One random history."""

    def __init__(self, rng: random.Random, node: SimulatedNode, checks: Checks) -> None:
        self.rng, self.node, self.checks = rng, node, checks
        self._names = NAMES[: rng.randint(1, len(NAMES))]
        self._gpus = node.reconciler.gpus.gpus
        self._fails = rng.choice((0.0, 0.0, 0.1, 0.5))
        self._slow = rng.random() < 0.3
        self._events: dict[Callable[[str], None], int] = {
            self._call: 30, self._burst: 10, self._deploy: 6, self._delete: 1, self._kill: 4, self._pressure: 3,
            self._pause: 2, self._resume: 3, self._warm: 4, self._expect: 2, self._limit: 2, self._reset: 1,
            self._use_up: 1,
        }  # fmt: skip

    async def run(self) -> int:
        """Let events happen, and wait until nothing happens any more. Return how many actions of the node followed the last event."""
        for name in self._names:
            self._deploy(name)
        for _ in range(self.rng.randint(5, 60)):
            await asyncio.sleep(self.rng.choice(GAPS_S) * self.rng.random())
            [event] = self.rng.choices([*self._events], [*self._events.values()])
            event(self.rng.choice(self._names))
            self.node.on_event()
        self.node.tell("the last event")
        self.node.world.calm = True
        await asyncio.sleep(CALLS_S)
        steps = self.checks.actions - self.checks.actions_at_event
        if self.rng.random() < 0.5:
            await self._steady()
        # A budget begins anew each day, and would let workers start again.
        self._lift_budgets()
        self.checks.rests = True
        await asyncio.sleep(REST_S)
        self.checks.check_end()
        return steps

    # -- what happens

    def setup(self) -> Setup:
        rng = self.rng
        most = rng.choice((1, 1, 2, 3, 4, 8))
        scale: dict[str, Any] = {"max": most}
        if rng.random() < 0.25:
            scale["min"] = rng.randint(0, min(2, most))
        if rng.random() < 0.2:
            scale["buffer"] = rng.randint(1, min(2, most))
        if rng.random() < 0.4:
            scale["idle_timeout_s"] = rng.choice((0.0, 0.5, 5.0, 30.0, 100.0))
        if rng.random() < 0.3:
            scale["park_after_s"] = rng.choice((0.0, 0.2, 3.0, 20.0))
        if rng.random() < 0.2:
            scale["rest"] = "local"
        # A setting that no longer exists was drawn here. Without the draw, a seed of FOUND would be another history.
        rng.random()
        gpus = gpu_mb = 0
        if self._gpus and rng.random() < 0.6:
            gpus = rng.randint(1, len(self._gpus)) if rng.random() < 0.2 else 1
            gpu_mb = rng.choice((1024, 2048, 3072, 4096))
        nature = Nature(
            fails=self._fails * rng.random(), frees=rng.random() < 0.8, slots=rng.choice((1, 1, 1, 2, 4)),
            rehearses=gpus > 0 and rng.random() < 0.6,
        )  # fmt: skip
        batch = rng.choice((1, 1, 1, 4))
        nature.batching = batch > 1
        nature.prefetch = 32 if batch == 1 and self._fails == 0.1 else 0
        if self._slow:
            nature.start_s, nature.end_s = (0.5, 15.0), (0.0, 3.0)
        return Setup(
            scale, nature, rng.choice(OWNERS), rng.choice((5.0, 60.0, 600.0, 600.0)),
            concurrency=1 if batch > 1 else nature.slots, batch=batch, idempotent=rng.random() < 0.8,
            gpus=gpus, gpu_mb=gpu_mb, seconds_per_day=rng.choice((None,) * 6 + (20.0, 500.0)),
            price_waiting_s=rng.choice((0.0, 0.0001, 0.001, 0.1)),
        )  # fmt: skip

    def _plan(self) -> CallPlan:
        takes_s = self.rng.choice((0.0, 0.01, 0.1, 0.5, 2.0, 10.0)) * self.rng.random()
        breaks = self._fails / 4
        return CallPlan(
            takes_s, self.rng.random() < 0.05, self.rng.random() < breaks, heeds=self.rng.random() < 0.5
        )

    def _call(self, name: str) -> None:
        leaves_s = self.rng.uniform(0.0, 3.0) if self.rng.random() < 0.1 else math.inf
        self.node.call(name, self._plan(), leaves_s=leaves_s, job=self.rng.random() < 0.1)

    def _burst(self, name: str) -> None:
        every_s = self.rng.choice((0.0, 0.0, 0.02, 0.3))
        for number in range(self.rng.randint(2, 40)):
            self.node.loop.call_later(every_s * number, self._call, name)

    def _deploy(self, name: str) -> None:
        function = self.node.function(name)
        if sum(not task.done() for task in function.deploys) < 2:
            deploy = self.node.deploy(name, self.setup(), check=self.rng.random() < 0.7)
            function.deploys.append(self.node.tasks.create_task(deploy))
            if self.rng.random() < 0.05:
                self.node.loop.call_later(self.rng.uniform(0.0, 2.0), function.deploys[-1].cancel)

    def _delete(self, name: str) -> None:
        self.node.tasks.create_task(self.node.delete(name))

    def _kill(self, name: str) -> None:
        world = self.node.world
        processes = [each for each in world.processes.values() if not each.dead]
        victims: list[SimulatedProcess | SimulatedSource] = [*processes]
        if self.rng.random() < 0.3:
            victims += world.sources.values()
        if not victims:
            return
        self.rng.choice(victims).crash()

    def _pressure(self, name: str) -> None:
        function = self.node.function(name)
        rung = self.rng.choice((RungName.ZYGOTE, RungName.LOCAL))
        self.node.tell(f"{name} yields to {rung}")
        function.function.ladder.yield_to(rung)

    def _pause(self, name: str) -> None:
        self._set_paused(name, paused=True)

    def _resume(self, name: str) -> None:
        self._set_paused(name, paused=False)

    def _set_paused(self, name: str, *, paused: bool) -> None:
        function = self.node.function(name)
        self.node.tell(f"{name} is {'paused' if paused else 'resumed'}")
        function.function.paused = paused
        for one in self.node.members.values():
            if one.function is function.function:
                one.look()

    def _warm(self, name: str) -> None:
        if (live := self.node.function(name).live) is not None:
            cause = self.rng.choice(("warmup", "schedule nightly", "hook x", "backlog"))
            workers, for_s = self.rng.randint(1, 4), self.rng.choice((0.5, 10.0, 60.0, 300.0))
            self.node.tell(f"{live.key} is to have {workers} workers for {for_s} s: {cause}")
            live.warm(workers, cause, for_s)

    def _expect(self, name: str) -> None:
        if (live := self.node.function(name).live) is not None:
            live.expect(self.rng.randint(1, 10), "backlog")

    def _limit(self, name: str) -> None:
        owner = self.rng.choice(OWNERS[1:])
        self.node.owners[owner] = self.rng.choice((None, 1, 2, 3, 5))
        self.node.tell(f"{owner} may have {self.node.owners[owner]} workers")
        self.node.reconciler.limits.note_change()

    def _reset(self, name: str) -> None:
        if (live := self.node.function(name).live) is not None:
            self.node.tell(f"{live.key} is reset")
            live.reset()

    def _use_up(self, name: str) -> None:
        if (live := self.node.function(name).live) is not None:
            account = live.function.account
            spent = account.spent.seconds
            self.node.tell(f"{name} may use 0.1 s more of {spent:.1f} s today")
            account.open(account.budget.__class__(seconds_per_day=spent + 0.1), live.owner)

    def _lift_budgets(self) -> None:
        for function in self.node.functions.values():
            if (live := function.live) is not None:
                account = function.function.account
                account.open(account.budget.__class__(), live.owner)

    # -- a constant load

    async def _steady(self) -> None:
        """Repeat a load. Raise Broken if a worker starts, stops, parks or wakes after the load has
        settled.
        """
        rng, node, steady = self.rng, self.node, 0
        if node.most is not None or any(node.owners.values()) or self._gpus:
            return
        for function in node.functions.values():
            live = function.live
            history = function.function
            # Skip functions with plans: waiting is so cheap for them that a plan may end the worker between
            # two calls.
            if live is None or history.paused or history.account.limited or history.ladder.plans:
                continue
            every_s, plan = rng.choice((0.1, 0.5, 2.0)), CallPlan(rng.choice((0.01, 0.1, 0.6)))
            scale = live.revision.policy.scale
            if (
                min(scale.park_after_s, scale.scale_to_zero_s, scale.scale_down_s)
                <= 3 * every_s + plan.takes_s
            ):
                continue
            node.tell(f"{live.key} is called every {every_s} s for {plan.takes_s} s")
            for number in range(int((SETTLES_S + STEADY_S) / every_s)):
                node.loop.call_later(number * every_s, node.call, function.name, plan)
            steady += 1
        await asyncio.sleep(SETTLES_S)
        before = self.checks.actions
        await asyncio.sleep(STEADY_S - SLACK_S)
        if steady and self.checks.actions > before:
            raise Broken(f"{self.checks.actions - before} actions under constant load")
        await asyncio.sleep(CALLS_S)


def run_history(seed: int, *, verbose: bool = False) -> HistoryFigures:
    """Run one history. Raise HistoryFailed, which names the seed and the last decisions."""
    rng, loop = random.Random(seed), SimulatedLoop()
    nodes = list[SimulatedNode]()

    async def in_thread(*arguments: Any, **named: Any) -> Any:
        return await nodes[0].in_thread(*arguments, **named)

    with mock.patch("asyncio.to_thread", in_thread):
        try:
            figures = run_simulated(_run(rng, loop, nodes, verbose=verbose), loop)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise _failure(seed, nodes, f"{type(error).__name__}: {_innermost(error)}") from error
    return figures


async def _run(
    rng: random.Random, loop: SimulatedLoop, nodes: list[SimulatedNode], *, verbose: bool
) -> HistoryFigures:
    gpus = [Gpu(str(number), rng.choice((4096, 6144, 8192))) for number in range(rng.choice((0, 0, 1, 2, 3)))]
    owners: dict[str, int | None] = {owner: rng.choice((None, None, 2, 4)) for owner in OWNERS[1:]}
    most = rng.choice((None, None, 1, 2, 3, 5, 8))
    real, cost_s = allocation.allocate, rng.choice((0.0, 0.001, 0.05))

    def slow(*arguments: Any) -> Any:
        # An allocation takes simulated time, which delays the next one.
        loop.clock.now_s += 0.0 if checks.looks_again else cost_s
        return real(*arguments)

    async with asyncio.TaskGroup() as tasks:
        node = SimulatedNode(rng, loop, tasks, gpus, most, owners, verbose=verbose)
        nodes.append(node)
        node.tell(f"max_workers {most}, owners {owners}, GPUs {gpus}, an allocation takes {cost_s} s")
        checks = Checks(node)
        checks.allocation_s = cost_s
        history = History(rng, node, checks)
        with mock.patch.object(reconciler, "allocate", slow):
            try:
                steps = await history.run()
            finally:
                checks.close()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
    return HistoryFigures(
        node.calls, checks.actions, checks.looks, steps, checks.most_runs, checks.longest_wait_s
    )


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _failure(seed: int, nodes: list[SimulatedNode], message: str) -> HistoryFailed:
    lines = "\n".join(list(nodes[0].lines)[-LAST_LINES:]) if nodes else ""
    return HistoryFailed(f"{lines}\nseed {seed}: {message}\nReplay it: python tests/histories.py {seed}")


if __name__ == "__main__":
    print(run_history(int(sys.argv[1]), verbose=True))
