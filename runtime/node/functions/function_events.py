"""Defines the events of functions, and the observers of plugins, which follow the events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from ....errors import PilotflameError
from ...calls.serving.invocation import Invocation
from ...ground.telemetry.invocation_end import GenerationEnd, InvocationEnd
from ...ground.telemetry.log_files import LogLine
from ...ground.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class FunctionEvents:
    """Lists of callbacks. To subscribe, append a callback. A list's callbacks run in their order on the event loop."""

    activated: list[Callable[[str, str], None]] = field(default_factory=list)
    """Called when the start of a worker has succeeded or failed, with the function's name and the outcome."""
    processes: list[Callable[[str], None]] = field(default_factory=list)
    """Called with a function's name when a worker, a zygote or a standby of the function has started or ended."""
    called: list[Callable[[str, float], None]] = field(default_factory=list)
    """Called with a function's name and the arrival time of an invocation, in monotonic seconds. To keep calls rare,
    it is called at most once every CALL_NOTICE_S, and not for each invocation."""
    begun: list[Callable[[str, Invocation], None]] = field(default_factory=list)
    """Called with a function's name and an invocation before the invocation is queued or sent."""
    ended: list[Callable[[InvocationEnd], None]] = field(default_factory=list)
    """Called when an invocation has ended with an output or an error. Invocations of jobs are included."""
    generated: list[Callable[[GenerationEnd], None]] = field(default_factory=list)
    """Called when an answer of a language model has ended."""
    refused: list[Callable[[str, PilotflameError], None]] = field(default_factory=list)
    """Called with a function's name and an error when a caller's request was refused before it became an invocation."""
    live: list[Callable[[str], None]] = field(default_factory=list)
    """Called with a function's name when a revision of the function has become live, and when the function was paused,
    resumed or reset."""
    deleted: list[Callable[[str], None]] = field(default_factory=list)
    """Called with a function's name when its deletion begins. From then on, the function accepts no more requests."""
    logged: list[Callable[[LogLine], None]] = field(default_factory=list)
    """Called with each line of a function's log when it is written."""
    removed: list[Callable[[str], None]] = field(default_factory=list)
    """Called with a function's name when its deletion has ended. Then no process of the function runs any more. It is not
    called if there is a new function of this name by then, which goes on with the counts of the old function."""

    def note_live(self, function: str) -> None:
        """Call the callbacks of `live`."""
        for callback in self.live:
            callback(function)


class Observer:
    """Follows the events of all functions, as a plugin in the group `pilotflame.observers` does. This class does nothing.

    The events come on the event loop, several for each invocation. So a subscriber must be quick, and must not raise.
    """

    call_observer: str = ""
    """The function ("package.module:name") that returns a `CallObserver` for each zygote; "" for none."""

    @classmethod
    def open(cls) -> Self | None:
        """Return the observer, or None if it is off. Called once when the gateway starts. Raise GatewayError if its settings are wrong."""
        return cls()

    def follow(self, events: FunctionEvents, metrics: Metrics) -> None:
        """Subscribe to events. Called before the first function exists. `metrics` has the counts so far at any time."""

    async def close(self) -> None:
        """Finish within a few seconds. No event follows."""
