"""Draws charts as SVG of our own: text, lines and areas in panels with axes, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 } .axis { stroke: #8c959f; stroke-width: 1 }
.page { fill: #ffffff }
.orange { fill: #e8590c } .amber { fill: #ffc078 } .blue { fill: #1c7ed6 } .grey { fill: #868e96 }
.red { fill: #e03131 } .pale { fill: #dee2e6 } .faint { fill: #f1f3f5 }
.line { fill: none; stroke-width: 1.5 } .line.grey { stroke: #495057; fill: none } .line.blue { stroke: #1c7ed6; fill: none }
.line.orange { stroke: #e8590c; fill: none } .dashed { stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #30363d } .axis { stroke: #6e7681 }
  .page { fill: #0d1117 } .amber { fill: #8f5a1f } .pale { fill: #3d444d } .faint { fill: #21262d }
  .line.grey { stroke: #adb5bd }
}
"""
# Steps of a time axis, in seconds.
TIME_STEPS_S = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 7 * 86400)
MAX_TIME_TICKS = 9
# An axis of more decades than this has marks at powers of ten only.
FINE_DECADES = 3
Scale = Callable[[float], float]
"""Maps a value to a coordinate."""


class Drawing:
    """A picture that is being made. Coordinates are pixels."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            ' aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>', f'<desc id="desc">{escape(description)}</desc>',
            f"<style>{STYLE}</style>", f'<rect class="page" width="{width}" height="{height}"/>',
        ]  # fmt: skip

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        if width > 0 and height > 0:
            self._parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
            )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def path(self, points: Iterable[tuple[float, float]], kind: str, *, closed: bool = False) -> None:
        """Draw a line through points, or the area that they enclose."""
        steps = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if steps:
            self._parts.append(f'<path class="{kind}" d="M {steps}{" Z" if closed else ""}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str, words: str = "") -> None:
        """Draw a dot. A pointer on it shows `words`."""
        told = f"<title>{escape(words)}</title>" if words else ""
        self._parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">{told}</circle>'
        )

    def done(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def linear(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / span


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Values below `low` are drawn at it."""
    inner = linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(max(value, low)))


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ... that is no less."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return (
        next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
        if value > 0
        else 1.0
    )


def decades(low: float, high: float) -> list[float]:
    """Return the marks of a logarithmic axis: powers of ten, and twice and five times those if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > FINE_DECADES else (1, 2, 5)
    found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [value for value in found if low <= value <= high]


def time_ticks(begin: float, end: float) -> list[tuple[float, str]]:
    """Return times between two Unix times at which an axis has a mark, with the words there, in local time."""
    step_s = next((step for step in TIME_STEPS_S if (end - begin) / step <= MAX_TIME_TICKS), TIME_STEPS_S[-1])
    offset = datetime.fromtimestamp(begin, UTC).astimezone().utcoffset()
    shift_s = offset.total_seconds() if offset is not None else 0.0
    form = "%H:%M:%S" if step_s < 60 else "%H:%M" if step_s < 86400 else "%d %b"
    first = math.ceil((begin + shift_s) / step_s)
    count = max(0, math.floor((end + shift_s) / step_s) - first + 1)
    moments = [(first + number) * step_s - shift_s for number in range(count)]
    return [(at, datetime.fromtimestamp(at, UTC).astimezone().strftime(form)) for at in moments]


def legend(drawing: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """Draw the meanings of colours in a row that ends at `x`."""
    for kind, words in reversed(entries):
        x -= 5.9 * len(words)
        drawing.text(x, y, words, kind="small")
        x -= 15
        drawing.rect(x, y - 9, 10, 10, kind)
        x -= 12
