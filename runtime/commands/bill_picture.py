"""Draws what keep-alive policies cost: money for holding against the seconds that callers waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import svg
from .keep_alive_replay import PolicyOutcome, ReplayedFunction, replay
from .svg import Drawing

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 560, 84, 900, 66, 500
TIMEOUTS_S = (0.1, 0.5, 2, 5, 15, 60, 180, 600, 1800, 7200, 21600, 86400)
# The points of the curve of equal bills.
CURVE_POINTS = 120
LABEL_HEIGHT, LABEL_WIDTH = 16, 150


def draw_bills(functions: Sequence[ReplayedFunction], outcomes: Sequence[PolicyOutcome], file: Path) -> None:
    """Write the picture of outcomes into a file, with a curve of fixed timeouts from 0.1 s to a day."""
    fixed = [replay(functions, f"fixed:{after_s}") for after_s in TIMEOUTS_S]
    file.write_text(bill_picture(outcomes, fixed, functions[0].ladder.wait_per_s))


def bill_picture(outcomes: Sequence[PolicyOutcome], fixed: Sequence[PolicyOutcome], wait_per_s: float) -> str:
    """Return the picture. `fixed` are the points of the curve, `wait_per_s` is what a second of waiting is worth."""
    shown = [*outcomes, *fixed]
    holdings = [one.holding for one in shown if one.holding > 0] or [1.0]
    waits = [one.waiting_s for one in shown if one.waiting_s > 0] or [1.0]
    low_x, high_x, low_y, high_y = min(holdings) / 1.5, max(holdings) * 1.5, min(waits) / 3, max(waits) * 1.5
    x = svg.logarithmic(low_x, high_x, LEFT, RIGHT)
    y = svg.logarithmic(low_y, high_y, BOTTOM, TOP)
    words = "; ".join(
        f"{one.name}: holding {one.holding:.4g}, waiting {one.waiting_s:.4g} s" for one in outcomes
    )
    drawing = Drawing(WIDTH, HEIGHT, "Holding cost and waiting under keep-alive policies", words)
    drawing.text(LEFT, 26, "What keeping warm costs, and what not keeping warm costs", kind="title")
    drawing.text(
        LEFT, 46, "further left: less paid for holding; further down: callers wait less", kind="small"
    )
    _axes(drawing, (low_x, high_x), (low_y, high_y), x, y)
    if outcomes and wait_per_s > 0:
        _equal_bills(drawing, outcomes[0], wait_per_s, (low_x, high_x), (low_y, high_y), x, y)
    drawing.path([(x(one.holding), y(one.waiting_s)) for one in fixed], "line grey")
    for one in fixed:
        drawing.dot(x(one.holding), y(one.waiting_s), 2.5, "grey", one.name)
    _points(drawing, outcomes, x, y)
    return drawing.done()


def _axes(
    drawing: Drawing, across: tuple[float, float], up: tuple[float, float], x: svg.Scale, y: svg.Scale
) -> None:
    for value in svg.decades(*across):
        drawing.line(x(value), TOP, x(value), BOTTOM, "grid")
        drawing.text(x(value), BOTTOM + 18, f"{value:g}", kind="small", anchor="middle")
    for value in svg.decades(*up):
        drawing.line(LEFT, y(value), RIGHT, y(value), "grid")
        drawing.text(LEFT - 8, y(value) + 4, f"{value:g} s", kind="small", anchor="end")
    drawing.line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")
    drawing.line(LEFT, TOP, LEFT, BOTTOM, "axis")
    drawing.text(LEFT - 8, BOTTOM + 4, "none", kind="small", anchor="end")
    drawing.text(RIGHT, BOTTOM + 40, "money for holding", anchor="end")
    drawing.text(LEFT - 70, TOP - 8, "all waiting")
    svg.legend(drawing, RIGHT, TOP - 8, (("grey", "fixed timeouts from 0.1 s to a day"),))


def _equal_bills(
    drawing: Drawing, one: PolicyOutcome, wait_per_s: float, across: tuple[float, float], up: tuple[float, float],
    x: svg.Scale, y: svg.Scale,
) -> None:  # fmt: skip
    """Draw where holding and waiting cost together what the first policy costs."""
    ratio = (across[1] / across[0]) ** (1 / CURVE_POINTS)
    points = [across[0] * ratio**number for number in range(CURVE_POINTS + 1)]
    pairs = [(held, (one.bill - held) / wait_per_s) for held in points if held < one.bill]
    drawing.path(
        [(x(held), y(waited)) for held, waited in pairs if up[0] <= waited <= up[1]], "line orange dashed"
    )
    drawing.text(LEFT, BOTTOM + 40, f"dashed: the same bill as {one.name}, {one.bill:.4g}", kind="small")


def _points(drawing: Drawing, outcomes: Sequence[PolicyOutcome], x: svg.Scale, y: svg.Scale) -> None:
    """Draw the outcomes with their names, which move down where they would cover another."""
    taken = list[tuple[float, float]]()
    for number, one in enumerate(outcomes):
        across, up = x(one.holding), y(one.waiting_s)
        words = f"{one.name}: bill {one.bill:.4g}, {one.cold_starts} cold starts"
        drawing.dot(across, up, 6, "orange" if number == 0 else "blue", words)
        after = across < RIGHT - LABEL_WIDTH
        left, low = across + 11 if after else across - 11 - LABEL_WIDTH, up - 5
        while any(
            abs(low - other) < LABEL_HEIGHT and abs(left - begin) < LABEL_WIDTH for begin, other in taken
        ):
            low -= LABEL_HEIGHT
        taken.append((left, low))
        drawing.text(left if after else left + LABEL_WIDTH, low, one.name, anchor="start" if after else "end")
