"""Records the metrics of one prediction by the rules of Cog: `current_scope().record_metric(name, value, mode)`."""

from __future__ import annotations

import re
import threading
from typing import Any

import orjson

MAX_NAME_CHARS = 128
MAX_STEPS = 4
MAX_METRICS = 1000
RESERVED = ("predict_time", "total_time")
MODES = ("replace", "incr", "append")
KINDS = (bool, int, float, str, list, dict)
_STEP = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9])*")


class CogMetrics:
    """The metrics of one prediction. Any thread of the predictor may change them.

    Names with dots make nested objects. A metric keeps its type until it is deleted.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._kinds: dict[str, type] = {}
        self._lock = threading.Lock()

    def record(self, name: str, value: Any, mode: str = "replace") -> None:
        """Set a metric, add to it (`incr`) or append to its list (`append`). The value None deletes the metric.

        Raise ValueError for a wrong name or mode. Raise TypeError if the metric already has another type, or if the
        type does not allow the mode.
        """
        if value is None:
            with self._lock:
                self._values.pop(name, None)
                self._kinds.pop(name, None)
            return
        _check_name(name)
        if mode not in MODES:
            raise ValueError(f"{mode!r} is no mode of metrics: use one of {', '.join(MODES)}")
        kind = next((kind for kind in KINDS if isinstance(value, kind)), None)
        if kind is None:
            raise TypeError(
                f"the metric {name!r} is {type(value).__name__}, not bool, int, float, str, list or dict"
            )
        if mode == "incr" and kind not in (int, float):
            raise TypeError(f"the metric {name!r} is {kind.__name__}: incr needs int or float")
        if kind in (list, dict):
            # Copy the value, because the predictor may change it later. `dumps` raises TypeError if it is not JSON.
            value = orjson.loads(orjson.dumps(value))
        with self._lock:
            before = self._kinds.get(name, kind)
            if before is not kind:
                fault = (
                    f"the metric {name!r} has type {before.__name__}, not {kind.__name__}: delete it first"
                )
                raise TypeError(fault)
            if name not in self._kinds and len(self._kinds) >= MAX_METRICS:
                raise ValueError(f"a prediction may have {MAX_METRICS} metrics")
            combined = self._combined(name, value, mode)
            # JSON cannot hold every value, for example a huge integer. Then raise TypeError here, and not only at the
            # end of the prediction.
            orjson.dumps(combined)
            self._values[name], self._kinds[name] = combined, kind

    def nested(self) -> dict[str, Any]:
        """Return all metrics as one JSON object."""
        found: dict[str, Any] = {}
        with self._lock:
            for name, value in sorted(self._values.items()):
                *steps, last = name.split(".")
                inner = found
                for step in steps:
                    # A metric `a.b` needs an object at `a`. This object replaces the value of a metric `a`.
                    known = inner.get(step)
                    inner[step] = inner = dict(known) if isinstance(known, dict) else {}
                inner[last] = value
        return found

    def _combined(self, name: str, value: Any, mode: str) -> Any:
        if mode == "incr":
            return self._values.get(name, 0) + value
        if mode == "replace":
            return value
        before = self._values.get(name, [])
        return [*(before if isinstance(before, list) else [before]), value]


def _check_name(name: str) -> None:
    steps = name.split(".")
    if (
        len(name) > MAX_NAME_CHARS
        or len(steps) > MAX_STEPS
        or not all(_STEP.fullmatch(step) for step in steps)
    ):
        rule = f"use letters, digits and _, a letter first, {MAX_STEPS} parts with dots between and {MAX_NAME_CHARS} characters at most"
        raise ValueError(f"{name[:MAX_NAME_CHARS]!r} cannot be a metric's name: {rule}")
    if name in RESERVED or steps[0] == "cog":
        raise ValueError(f"the metric's name {name!r} is reserved")
