"""Counts the inferences of each model, as the protocol's extension for statistics reports them."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ...ground.telemetry.timeline import Timeline
from .model import TensorModel

_NS = 1_000_000_000


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.ns += round(seconds * _NS)

    def shown(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class _Counts:
    """The calls of one function. Each call in a batch of n calls adds 1/n to `batches`."""

    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    batches: float = 0.0
    last_ms: int = 0


class Statistics:
    """The calls through this protocol since the gateway started."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, _Counts] = defaultdict(_Counts)

    def note(self, function: str, timeline: Timeline, *, failed: bool) -> None:
        """Count a call that has ended."""
        counts, total_s = self._counts[function], timeline.total_s
        if failed:
            counts.fail.add(total_s)
            return
        counts.success.add(total_s)
        counts.queue.add(max(0.0, total_s - timeline.exec_s))
        counts.compute.add(timeline.exec_s)
        counts.batches += 1 / max(1, timeline.batch)
        counts.last_ms = time.time_ns() // 1_000_000

    def note_refused(self, function: str) -> None:
        """Count a call that was refused."""
        self._counts[function].fail.add(0.0)

    def keep(self, functions: set[str]) -> None:
        """Forget the functions that no longer exist."""
        for name in self._counts.keys() - functions:
            del self._counts[name]

    def of(self, model: TensorModel, name: str) -> dict[str, Any]:
        """Return the counts of a model. `queue` is all time outside of the handler."""
        counts = self._counts.get(model.live.record.function) or _Counts()
        nothing = _Duration().shown()
        # Report no time for these phases, because `queue` includes it. The count must not be 0: perf_analyzer divides by it.
        passed = _Duration(counts.compute.count).shown()
        return {
            "name": name, "version": model.version, "last_inference": counts.last_ms,
            "inference_count": counts.success.count, "execution_count": round(counts.batches),
            "inference_stats": {
                "success": counts.success.shown(), "fail": counts.fail.shown(), "queue": counts.queue.shown(),
                "compute_input": passed, "compute_infer": counts.compute.shown(), "compute_output": passed,
                "cache_hit": nothing, "cache_miss": nothing,
            },
            "batch_stats": [], "memory_usage": [],
        }  # fmt: skip
