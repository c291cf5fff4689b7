"""Measures the steps of handlers, as the debugger of RunPod's package does."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar


class Checkpoints:
    """The names and durations of steps that handlers measure. `Checkpoints()` always returns the same object."""

    _only: ClassVar[Checkpoints | None] = None

    def __new__(cls) -> Checkpoints:
        if cls._only is None:
            cls._only = object.__new__(cls)
            cls._only.clear()
        return cls._only

    def add(self, name: str) -> None:
        if name in self.name_lookup:
            raise KeyError(f"There is a checkpoint {name!r} already.")
        self.name_lookup[name] = len(self.checkpoints)
        self.checkpoints.append({"name": name})

    def start(self, name: str) -> None:
        self._named(name).update(start=time.perf_counter(), start_utc=_now())

    def stop(self, name: str) -> None:
        step = self._named(name)
        if "start" not in step:
            raise KeyError(f"The checkpoint {name!r} was not started.")
        step.update(end=time.perf_counter(), stop_utc=_now())

    def get_checkpoints(self) -> list[dict[str, Any]]:
        """Return the steps that have ended since the last call."""
        ended = [step for step in self.checkpoints if "start" in step and "end" in step]
        for step in ended:
            step["duration_ms"] = (step.pop("end") - step.pop("start")) * 1000
        return ended

    def clear(self) -> None:
        self.checkpoints: list[dict[str, Any]] = []
        self.name_lookup: dict[str, int] = {}

    def _named(self, name: str) -> dict[str, Any]:
        if name not in self.name_lookup:
            raise KeyError(f"There is no checkpoint {name!r}.")
        return self.checkpoints[self.name_lookup[name]]


def _now() -> str:
    # RunPod's package writes both the offset and a Z.
    return f"{datetime.now(UTC).isoformat()}Z"


class LineTimer:
    """Measures a `with` block as a step."""

    def __init__(self, name: str) -> None:
        self.checkpoints, self.name = Checkpoints(), name
        self.checkpoints.add(name)

    def __enter__(self) -> None:
        self.checkpoints.start(self.name)

    def __exit__(self, *_: object) -> None:
        # Another job may have ended, and cleared the steps.
        if self.name in self.checkpoints.name_lookup:
            self.checkpoints.stop(self.name)


class FunctionTimer:
    """Measures each call of the decorated function as a step."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steps, name = Checkpoints(), self.function.__name__
        steps.add(name)
        steps.start(name)
        try:
            return self.function(*args, **kwargs)
        finally:
            # The function may have cleared the steps.
            if name in steps.name_lookup:
                steps.stop(name)


def get_debugger_output(version: str) -> dict[str, Any]:
    """Return a description of this machine, and the steps that have ended. Forget all steps."""
    found = Checkpoints().get_checkpoints()
    clear_debugger_output()
    system = {
        "os": f"{platform.system()} {platform.release()}", "processor": platform.processor(),
        "python_version": platform.python_version(), "runpod": version,
    }  # fmt: skip
    return {"system_info": system, "timestamps": found}


def clear_debugger_output() -> None:
    Checkpoints().clear()
