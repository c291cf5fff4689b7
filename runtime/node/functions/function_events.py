"""Defines the events of functions, and the observers of plugins, which follow the events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, Self

from ....errors import PilotflameError
from ...calls.serving.invocation import Invocation
from ...ground.settings.function_settings import FunctionSettings
from ...ground.telemetry.invocation_end import GenerationEnd, InvocationEnd
from ...ground.telemetry.log_files import LogLine
from ...ground.telemetry.metrics import Metrics

Arguments = ParamSpec("Arguments")


class Callbacks(list[Callable[Arguments, None]], Generic[Arguments]):
    """The callbacks for one event. They run on the event loop, in the order of this list."""

    def __call__(self, *positional: Arguments.args, **named: Arguments.kwargs) -> None:
        """Call each callback with the arguments of the event."""
        for callback in self:
            callback(*positional, **named)


@dataclass(frozen=True, slots=True)
class FunctionEvents:
    """The callbacks for each event. To subscribe, append a callback."""

    activated: Callbacks[[str, str]] = field(default_factory=Callbacks)
    """Called when the start of a worker has succeeded or failed, with the function's name and the outcome."""
    processes: Callbacks[[str]] = field(default_factory=Callbacks)
    """Called with a function's name when a worker, a zygote or a standby of the function has started or ended."""
    called: Callbacks[[str, float]] = field(default_factory=Callbacks)
    """Called with a function's name and the arrival time of an invocation, in monotonic seconds. To keep calls rare,
    it is called at most once every CALL_NOTICE_S, and not for each invocation."""
    begun: Callbacks[[str, Invocation]] = field(default_factory=Callbacks)
    """Called with a function's name and an invocation before the invocation is queued or sent."""
    ended: Callbacks[[InvocationEnd]] = field(default_factory=Callbacks)
    """Called when an invocation has ended with an output or an error. Invocations of jobs are included."""
    generated: Callbacks[[GenerationEnd]] = field(default_factory=Callbacks)
    """Called when an answer of a language model has ended."""
    refused: Callbacks[[str, PilotflameError]] = field(default_factory=Callbacks)
    """Called with a function's name and an error when a caller's request was refused before it became an invocation."""
    live: Callbacks[[str]] = field(default_factory=Callbacks)
    """Called with a function's name when a revision of the function has become live, when the function was paused,
    resumed or reset, and when its weights were compared after a start of the gateway.
    """
    deploying: list[Callable[[FunctionSettings, str], Awaitable[object]]] = field(default_factory=list)
    """Awaited with the settings and the id of the API key of a caller's deploy. An error refuses the deploy."""
    creating: list[Callable[[str], Awaitable[object]]] = field(default_factory=list)
    """Awaited with a function's name before the first revision of the function becomes live. An error refuses the deploy."""
    pruned: Callbacks[[str]] = field(default_factory=Callbacks)
    """Called with a function's name when files of its old revisions were removed."""
    deleted: Callbacks[[str]] = field(default_factory=Callbacks)
    """Called with a function's name when its deletion begins. From then on, the function accepts no more requests."""
    disowned: Callbacks[[str]] = field(default_factory=Callbacks)
    """Called after `deleted`, only on the gateway whose caller deleted the function. So it may delete data that all gateways share."""
    logged: list[Callable[[LogLine], None]] = field(default_factory=list)
    """Called with each line of a function's log when it is written."""
    removed: Callbacks[[str]] = field(default_factory=Callbacks)
    """Called with a function's name when its deletion has ended and no process of it runs any more. It is not called if
    a new function has the name by then, because the metrics of the new function continue the old counts.
    """


class Observer:
    """Follows the events of all functions. Plugins in the group `pilotflame.observers` are subclasses. This base class
    does nothing.

    Callbacks run on the event loop, several times for each invocation. So a callback must be quick, and must not raise.
    """

    call_observer: str = ""
    """The function ("package.module:name") that returns a `CallObserver` for each zygote; "" for none."""

    @classmethod
    def open(cls) -> Self | None:
        """Return the observer, or None if it is off. Called once when the gateway starts. Raise GatewayError if its settings are wrong."""
        return cls()

    def follow(self, events: FunctionEvents, metrics: Metrics) -> None:
        """Subscribe to events. Called before the first function exists. `metrics` always has the present counts."""

    async def close(self) -> None:
        """Finish within a few seconds. No event follows."""
