"""Draws the load of a function over time: workers, queue, calls with cold starts, and the rung it was held on."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from . import svg
from .svg import Drawing, Scale

WIDTH, LEFT, RIGHT = 960, 64, 936
TOP, PANEL, GAP, STRIP = 52, 110, 34, 26
BINS = 120
RUNGS = {"ready": "orange", "parked": "blue", "zygote": "amber", "resident": "grey", "local": "pale"}


class _Row(NamedTuple):
    begin: float
    end: float
    queued: int
    in_flight: int
    starting: int
    ready: int
    rung: str
    cold: int
    slowest_cold_s: float


class LoadPicture:
    """The picture of a function's samples between two Unix times."""

    def __init__(
        self,
        name: str,
        samples: Sequence[dict[str, Any]],
        arrivals: Sequence[float],
        begin: float,
        end: float,
    ) -> None:
        """`samples` are those of the route `/v1/functions/{function}/load`."""
        self._name, self._begin, self._end = name, begin, max(end, begin + 1.0)
        self._rows = self._cut(samples)
        low = bisect.bisect_left(arrivals, begin)
        self._arrivals = arrivals[low : bisect.bisect_right(arrivals, self._end)]
        self._x = svg.linear(begin, self._end, LEFT, RIGHT)

    def svg(self) -> str:
        height = TOP + 3 * (PANEL + GAP) + STRIP + 40
        cold = sum(row.cold for row in self._rows)
        said = f"{len(self._arrivals)} calls, {cold} of them cold; at most {self._most('ready')} workers ready and"
        drawing = Drawing(
            WIDTH, height, f"{self._name} over time", f"{said} {self._most('queued')} calls waiting."
        )
        drawing.text(LEFT, 24, f"{self._name}: {said} {self._most('queued')} calls waiting", kind="title")
        bottom = TOP + 3 * (PANEL + GAP) + STRIP
        for at, words in svg.time_ticks(self._begin, self._end):
            drawing.line(self._x(at), TOP, self._x(at), bottom, "grid")
            drawing.text(self._x(at), bottom + 18, words, kind="small", anchor="middle")
        self._workers(drawing, TOP)
        self._queue(drawing, TOP + PANEL + GAP)
        self._calls(drawing, TOP + 2 * (PANEL + GAP))
        self._rung(drawing, TOP + 3 * (PANEL + GAP))
        return drawing.done()

    def _cut(self, samples: Sequence[dict[str, Any]]) -> list[_Row]:
        """Return the samples as rows that end where the next one begins, without what is outside."""
        times = [datetime.fromisoformat(one["at"]).timestamp() for one in samples]
        rows = list[_Row]()
        for at, until, one in zip(times, [*times[1:], self._end], samples, strict=False):
            if until > self._begin and at < self._end:
                facts = {field: one[field] for field in _Row._fields if field in one}
                # Cold starts before the picture begins are not in it.
                facts |= {"cold": 0} if at < self._begin else {}
                rows.append(_Row(begin=max(at, self._begin), end=min(until, self._end), **facts))
        return rows

    def _most(self, field: str) -> int:
        return max((getattr(row, field) for row in self._rows), default=0)

    def _panel(
        self, drawing: Drawing, top: float, title: str, most: float, keys: Sequence[tuple[str, str]]
    ) -> Scale:
        """Draw the axis of a panel, and return its scale."""
        high = svg.round_up(most)
        scale = svg.linear(0, high, top + PANEL, top)
        for value in (0.0, high / 2, high):
            drawing.line(LEFT, scale(value), RIGHT, scale(value), "axis" if value == 0 else "grid")
            if value == 0 or value == int(value) or high < 2:
                drawing.text(LEFT - 8, scale(value) + 4, f"{value:g}", kind="small", anchor="end")
        drawing.text(LEFT, top - 8, title)
        svg.legend(drawing, RIGHT, top - 8, keys)
        return scale

    def _steps(self, scale: Scale, *fields: str) -> list[tuple[float, float]]:
        """Return the points of a line of steps: the sum of some fields."""
        points = list[tuple[float, float]]()
        for row in self._rows:
            y = scale(sum(getattr(row, field) for field in fields))
            points += [(self._x(row.begin), y), (self._x(row.end), y)]
        return points

    def _area(self, drawing: Drawing, scale: Scale, kind: str, *fields: str) -> None:
        if points := self._steps(scale, *fields):
            drawing.path([(points[0][0], scale(0)), *points, (points[-1][0], scale(0))], kind, closed=True)

    def _workers(self, drawing: Drawing, top: float) -> None:
        most = max((row.ready + row.starting for row in self._rows), default=0)
        scale = self._panel(drawing, top, "workers", most, (("orange", "ready"), ("amber", "starting")))
        self._area(drawing, scale, "amber", "ready", "starting")
        self._area(drawing, scale, "orange", "ready")

    def _queue(self, drawing: Drawing, top: float) -> None:
        most = max(self._most("queued"), self._most("in_flight"))
        scale = self._panel(drawing, top, "invocations", most, (("blue", "waiting"), ("grey", "running")))
        self._area(drawing, scale, "blue", "queued")
        drawing.path(self._steps(scale, "in_flight"), "line grey")

    def _calls(self, drawing: Drawing, top: float) -> None:
        width_s = (self._end - self._begin) / BINS
        edges = [self._begin + width_s * number for number in range(BINS + 1)]
        places = [bisect.bisect_left(self._arrivals, edge) for edge in edges]
        rates = [(places[number + 1] - places[number]) / width_s for number in range(BINS)]
        keys = (("grey", "answered"), ("red", "cold start"))
        scale = self._panel(drawing, top, "calls a second", max(rates, default=0.0), keys)
        for number, rate in enumerate(rates):
            left, right = self._x(edges[number]), self._x(edges[number + 1])
            drawing.rect(left, scale(rate), max(0.8, right - left - 0.6), scale(0) - scale(rate), "grey")
        for row in self._rows:
            if row.cold:
                words = f"{row.cold} waited for a worker, up to {row.slowest_cold_s * 1e3:.0f} ms"
                drawing.dot(self._x(row.begin), top + 5, min(6.0, 3.0 + row.cold / 4), "red", words)

    def _rung(self, drawing: Drawing, top: float) -> None:
        drawing.text(LEFT, top - 8, "rung")
        shown = dict.fromkeys(row.rung for row in self._rows)
        svg.legend(drawing, RIGHT, top - 8, [(RUNGS.get(rung, "faint"), rung) for rung in shown])
        merged = list[_Row]()
        for row in self._rows:
            if merged and merged[-1].rung == row.rung:
                merged[-1] = merged[-1]._replace(end=row.end)
            else:
                merged.append(row)
        for row in merged:
            left, right = self._x(row.begin), self._x(row.end)
            drawing.rect(left, top, max(0.8, right - left), STRIP, RUNGS.get(row.rung, "faint"))
