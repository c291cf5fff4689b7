"""Zygotes and workers that are simulated: they answer the frames of their links after random times, fail, die and end."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pilotflame.errors import ActivationFailed, Cancelled, HandlerFailed, LauncherError
from pilotflame.runtime.calls.link.child import Child
from pilotflame.runtime.calls.link.frames import Frame, FrameKind, Timing
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.telemetry.logs import Log

# The longest time between the end of a process and the report of it.
END_S = 0.05


@dataclass
class CallPlan:
    """What a call does at its worker."""

    takes_s: float
    fails: bool = False
    kills: bool = False
    """True if the call kills its worker."""
    heeds: bool = True
    """True if the handler ends at once when it is cancelled."""
    locks: bool = False
    """True if the worker reads no frames while the call runs."""
    starts: int = 0
    """How often the call has started."""


@dataclass
class Nature:
    """How the processes of one function behave. Times are drawn between the two numbers, in seconds."""

    launch_s: tuple[float, float] = (0.05, 0.5)
    fork_s: tuple[float, float] = (0.005, 0.02)
    start_s: tuple[float, float] = (0.02, 1.0)
    wake_s: tuple[float, float] = (0.01, 0.3)
    park_s: tuple[float, float] = (0.01, 0.3)
    end_s: tuple[float, float] = (0.0, 0.2)
    """The time from the last answer of a draining worker to its end."""
    fails: float = 0.0
    """The share of starts that fail with a report. The same share dies without a report."""
    frees: bool = True
    """True if a worker frees memory when it parks."""
    rehearses: bool = False
    slots: int = 1
    batching: bool = False
    prefetch: int = 0
    """The number of calls that a worker takes beyond its slots."""


@dataclass
class World:
    """The state that all simulated processes of a node share."""

    rng: random.Random
    trace: Callable[[str], None]
    calm: bool = False
    """True once nothing fails any more."""
    plans: dict[str, CallPlan] = field(default_factory=dict)
    processes: dict[int, SimulatedProcess] = field(default_factory=dict)
    """The processes that exist, by pid."""
    sources: dict[int, SimulatedSource] = field(default_factory=dict)
    pids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def draw(self, between: tuple[float, float]) -> float:
        return self.rng.uniform(*between)

    def chance(self, share: float) -> bool:
        return not self.calm and self.rng.random() < share


class SimulatedLink:
    """The gateway's end of the link to a simulated process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.closed = False
        self._process, self._loop = process, asyncio.get_running_loop()
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_close: Callable[[], None] = lambda: None
        self._early: list[Frame] = []
        self._ended = False

    # -- the gateway's side

    def bind(self, on_frame: Callable[[Frame], None], on_close: Callable[[], None]) -> None:
        self._on_frame, self._on_close = on_frame, on_close
        early, self._early = self._early, []
        for frame in early:
            self._loop.call_soon(self._receive, frame)
        if self._ended:
            self._loop.call_soon(self._lose)

    def send(self, kind: int, channel: int = 0, head: bytes = b"", payload: bytes = b"") -> None:
        if not self.closed:
            self._loop.call_soon(self._process.on_frame, kind, channel, orjson.loads(head or b"{}"))

    def send_json(self, kind: int, channel: int, head: dict[str, Any], payload: bytes = b"") -> None:
        if not self.closed:
            self._loop.call_soon(self._process.on_frame, kind, channel, head)

    def flush(self) -> None: ...

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.call_soon(self._process.on_hangup)

    def drain(self) -> None:
        self._lose()

    def note_peer_ended(self) -> None:
        self._ended = True
        if self._on_frame is not None:
            self._loop.call_soon(self._lose)

    # -- the process's side

    def deliver(self, kind: int, channel: int = 0, head: bytes = b"") -> None:
        frame = Frame(kind, channel, head, b"1")
        if self._on_frame is None:
            self._early.append(frame)
        else:
            self._loop.call_soon(self._receive, frame)

    def _receive(self, frame: Frame) -> None:
        if not self.closed and self._on_frame is not None:
            self._on_frame(frame)

    def _lose(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close()


class SimulatedProcess(Child):
    """A process that was forked: a standby, and a worker once it is activated."""

    def __init__(self, world: World, nature: Nature, name: str, source: SimulatedSource) -> None:
        super().__init__(SimulatedLink(self), next(world.pids), name)  # type: ignore[arg-type]
        self.world, self.nature, self.source = world, nature, source
        self.activated = self.ready = self.draining = self.wants_end = self.dead = False
        self._running: dict[int, tuple[list[tuple[int, CallPlan]], asyncio.TimerHandle | None]] = {}
        self._queue: deque[list[tuple[int, CallPlan]]] = deque()
        self._group: list[tuple[int, CallPlan]] = []
        self._cancelled = set[int]()
        self._asleep = self._parking = False
        self._park_number = 0
        self._unread: list[tuple[int, int, dict[str, Any]]] = []
        world.processes[self.pid] = self
        source.children.append(self)
        if nature.rehearses:
            self._later(nature.start_s, self._prime)

    @property
    def is_parked(self) -> bool:
        """True if the worker has freed its memory."""
        return self._asleep and not self._parking and self.nature.frees

    def _later(self, between: tuple[float, float], what: Callable[..., None], *arguments: object) -> None:
        self._loop.call_later(self.world.draw(between), self._if_alive, what, *arguments)

    def _if_alive(self, what: Callable[..., None], *arguments: object) -> None:
        if not self.dead:
            what(*arguments)

    def _say(self, kind: int, channel: int = 0, head: Mapping[str, Any] | bytes = b"") -> None:
        self.link.deliver(kind, channel, head if isinstance(head, bytes) else orjson.dumps(head))  # type: ignore[attr-defined]

    # -- its end

    def send_signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.die(-9)

    def crash(self) -> None:
        self.die(-9)

    def die(self, code: int) -> None:
        """End at once. The end of the link, the exit code and the end of the process are reported in any order."""
        if self.dead:
            return
        self.dead = True
        for _, timer in self._running.values():
            if timer is not None:
                timer.cancel()
        self.world.trace(f"  process {self.name} ends with {code}")
        delays_s = [self.world.draw((0.0, END_S)) for _ in range(3)]
        self._loop.call_later(delays_s[0], self.link.note_peer_ended)
        self._loop.call_later(delays_s[1], self.report_exit, code)
        self._loop.call_later(delays_s[2], self._go)

    def _go(self) -> None:
        self.world.processes.pop(self.pid, None)
        self.ended()

    def on_hangup(self) -> None:
        """End, because the gateway has closed the link."""
        if not self.dead:
            self._later(self.nature.end_s, self.die, 0)

    def on_source_gone(self) -> None:
        """React to the end of the zygote: a standby ends, a worker drains."""
        if not self.activated:
            self.on_hangup()
        elif self.ready:
            self._ask_to_end()
        else:
            self.wants_end = True

    def _ask_to_end(self) -> None:
        if not self.draining:
            self._say(FrameKind.DRAIN, 0, {})

    # -- frames

    def _prime(self) -> None:
        if not self.activated:
            self._say(FrameKind.PRIMED, 0, {"reserved": [64 << 20]})

    def on_frame(self, kind: int, channel: int, head: dict[str, Any]) -> None:
        if self.dead:
            return
        if any(plan.locks for group, _ in self._running.values() for _, plan in group):
            self._unread.append((kind, channel, head))
        elif kind == FrameKind.ACTIVATE:
            self.activated = True
            self._later(self.nature.start_s, self._end_start)
        elif kind == FrameKind.INVOKE:
            self._invoke(channel, head)
        elif kind == FrameKind.CANCEL:
            self._cancel(channel)
        elif kind == FrameKind.DRAIN:
            self._drain()
        elif kind == FrameKind.ASK_BACK:
            self._give_back()
        elif kind == FrameKind.PARK:
            self._park_number, self._asleep, self._parking = channel, True, True
            self._later(self.nature.park_s, self._end_park, channel)
        elif kind == FrameKind.UNPARK:
            self._later(self.nature.wake_s, self._end_wake, self._park_number)

    def _end_start(self) -> None:
        if self.draining:
            return
        if self.world.chance(self.nature.fails):
            error = ActivationFailed("The simulated start has failed.")
            self._say(FrameKind.FAILED, 0, error.to_wire(private=True))
            self._later(self.nature.end_s, self.die, 1)
        elif self.world.chance(self.nature.fails):
            self.die(-11)
        else:
            self.ready, slots = True, self.nature.slots
            window = slots + self.nature.prefetch
            self._say(
                FrameKind.READY, 0, {"window": window, "slots": slots, "batching": self.nature.batching}
            )
            if self.wants_end:
                self._ask_to_end()

    def _end_park(self, number: int) -> None:
        if self._asleep and number == self._park_number and self._parking and not self.draining:
            self._parking = False
            freed = 1 << 30 if self.nature.frees else 0
            self._say(FrameKind.PARKED, number, {"freed_bytes": freed, "reserved": [64 << 20]})

    def _end_wake(self, number: int) -> None:
        if number != self._park_number or not self._asleep:
            return
        self._asleep = self._parking = False
        if self.world.chance(self.nature.fails):
            self._ask_to_end()
        self._start()

    def _drain(self) -> None:
        if self.draining:
            return
        self.draining = True
        self._give_back()
        self._leave()

    def _give_back(self) -> None:
        for group in self._queue:
            for channel, _ in group:
                self._say(FrameKind.RETURNED, channel)
        self._queue.clear()

    def _leave(self) -> None:
        if self.draining and not self._running:
            self._later(self.nature.end_s, self.die, 0)

    # -- calls

    def _invoke(self, channel: int, head: dict[str, Any]) -> None:
        if self.draining:
            self._say(FrameKind.RETURNED, channel)
            return
        self._group.append((channel, self.world.plans[head["id"]]))
        if not head.get("more"):
            self._queue.append(self._group)
            self._group = []
            self._start()

    def _start(self) -> None:
        while self._queue and len(self._running) < self.nature.slots and not self._asleep:
            group = self._queue.popleft()
            takes_s = max(plan.takes_s for _, plan in group)
            for _, plan in group:
                plan.starts += 1
            timer = None if takes_s == math.inf else self._loop.call_later(takes_s, self._end, group[0][0])
            self._running[group[0][0]] = (group, timer)

    def _cancel(self, channel: int) -> None:
        self._cancelled.add(channel)
        for key, (group, _) in list(self._running.items()):
            if channel in dict(group) and all(one in self._cancelled and plan.heeds for one, plan in group):
                self._end(key)

    def _end(self, key: int) -> None:
        if key not in self._running or self.dead:
            return
        group, timer = self._running.pop(key)
        if timer is not None:
            timer.cancel()
        if any(plan.kills for _, plan in group) and not self.world.calm:
            self._running[key] = (group, None)
            self.die(-11)
            return
        for channel, plan in group:
            if channel in self._cancelled and plan.heeds:
                error = Cancelled("The caller went away.").to_wire(private=True)
                self._say(FrameKind.ERROR, channel, error)
            elif plan.fails:
                self._say(FrameKind.ERROR, channel, HandlerFailed("It fails.").to_wire(private=True))
            else:
                self._say(FrameKind.RESULT, channel, Timing(0.0, plan.takes_s, len(group), 1.0).pack())
        self._start()
        self._read()
        self._leave()

    def _read(self) -> None:
        """Read the frames that arrived while a call blocked the worker."""
        unread, self._unread = self._unread, []
        for kind, channel, head in unread:
            self.on_frame(kind, channel, head)


class SimulatedSource:
    """A simulated zygote."""

    spawn_reason = ""

    def __init__(self, world: World, nature: Nature, label: str, on_death: Callable[[], None]) -> None:
        self.facts = {"rehearses": nature.rehearses}
        self.alive, self.zygote_pid = True, next(world.pids)
        self.label, self.children = label, list[SimulatedProcess]()
        self._world, self._nature, self._on_death = world, nature, on_death
        world.sources[self.zygote_pid] = self

    async def fork(self, name: str, logs: Log, rehearsal_mb: int | None = None) -> Child:
        await asyncio.sleep(self._world.draw(self._nature.fork_s))
        if not self.alive or self._world.chance(self._nature.fails / 2):
            raise LauncherError("The simulated zygote did not fork.")
        return SimulatedProcess(self._world, self._nature, name, self)

    def close(self) -> None:
        if self.alive:
            self._end()

    def crash(self) -> None:
        if self.alive:
            self._world.trace(f"  zygote of {self.label} dies")
            self._end()
            asyncio.get_running_loop().call_soon(self._on_death)

    def _end(self) -> None:
        self.alive = False
        self._world.sources.pop(self.zygote_pid, None)
        for child in self.children:
            if not child.dead:
                asyncio.get_running_loop().call_soon(child.on_source_gone)

    async def wait_closed(self, timeout_s: float) -> None:
        await asyncio.sleep(self._world.draw((0.0, END_S)))


class SimulatedLauncher:
    """Launches the zygotes of a node. `natures` has the behaviour of the processes of each revision."""

    def __init__(self, world: World) -> None:
        self.natures = dict[str, Nature]()
        self._world = world

    async def launch(
        self, spec: WorkerSpec, logs: Log, on_death: Callable[[], None], secrets: Mapping[str, str] = {}
    ) -> SimulatedSource:
        nature = self.natures[spec.revision]
        await asyncio.sleep(self._world.draw(nature.launch_s))
        if self._world.chance(nature.fails / 2):
            raise LauncherError("The simulated zygote did not start.")
        return SimulatedSource(self._world, nature, spec.label, on_death)

    async def prepare(self, spec: WorkerSpec) -> None: ...

    async def provide(self, spec: WorkerSpec) -> bool:
        return False

    async def forget(self, spec: WorkerSpec) -> None: ...

    def base_pids(self) -> list[int]:
        return []

    def end_unused(self) -> None: ...

    async def close(self) -> None: ...
