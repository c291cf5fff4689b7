"""The README's chart: a cold start beside a fresh process and a warm request, as SVG on a logarithmic axis.

python infra/bench/chart.py      # from build/bench/bench.json, as `make bench` left it
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
TARGET = _ROOT / "docs" / "cold-start.svg"
BARS = (
    ("a fresh process (import, load)", "fresh_process_ms", "other"),
    ("pilotflame, from zero workers", "cold_ms", "ours"),
    ("pilotflame, warm", "warm_ms", "ours"),
)
LEFT, RIGHT, TOP, ROW, BAR = 290, 760, 46, 38, 22
WIDTH, HEIGHT = 860, TOP + ROW * len(BARS) + 46
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; fill: #57606a }
.grid { stroke: #d0d7de }
.ours { fill: #e8590c } .other { fill: #868e96 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #3d444d }
}
"""


def write(figures: Mapping[str, float], path: Path = TARGET) -> None:
    """Write the chart of these figures (milliseconds by name) to `path`."""
    path.write_text(svg(figures))


def svg(figures: Mapping[str, float]) -> str:
    """Return the chart. The axis begins at 1 ms."""
    values = [figures[name] for _, name, _ in BARS]
    low, high = 0, math.ceil(math.log10(max(values)))

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log10(value) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Time to the first correct answer over HTTP, all-MiniLM-L6-v2</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="22">Time to the first correct answer over HTTP (all-MiniLM-L6-v2, 2 CPU cores)</text>',
    ]
    bottom = TOP + ROW * len(BARS)
    for power in range(low, high + 1):
        at = x(10**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP - 8}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(
            f'<text class="small" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{_time(10**power)}</text>'
        )
    for row, ((label, _, kind), value) in enumerate(zip(BARS, values, strict=True)):
        y = TOP + ROW * row
        parts.append(f'<text x="{LEFT - 12}" y="{y + 16}" text-anchor="end">{label}</text>')
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{x(value) - LEFT:.1f}" height="{BAR}" rx="3"/>'
        )
        parts.append(f'<text x="{x(value) + 8:.1f}" y="{y + 16}">{_time(value)}</text>')
    parts.append(
        f'<text class="small" x="{RIGHT}" y="{bottom + 36}" text-anchor="end">logarithmic axis; medians of one run of make bench</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _time(ms: float) -> str:
    return (
        f"{ms / 1000:g} s"
        if ms >= 1000 and ms % 1000 == 0
        else f"{ms / 1000:.1f} s"
        if ms >= 1000
        else f"{ms:.3g} ms"
    )


if __name__ == "__main__":
    write(json.loads((_ROOT / "build" / "bench" / "bench.json").read_text())["figures"])
