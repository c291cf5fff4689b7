"""Record a command's output as an animated SVG: its lines appear in the order and rhythm in which it printed them.

    .venv/bin/python infra/terminal_recording.py docs/demo.svg -- pilotflame demo

The command runs in a pseudo-terminal. Its standard error, where progress is shown, is not recorded. A viewer without
animations shows the whole output.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 104
# The whole recording is played in this time.
PLAYED_S = 5.0
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  line-height: {line_height}px }}
.{unique_id}-title {{ font: bold 16px system-ui, sans-serif }}
@keyframes appear {{ from {{ visibility: hidden }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none !important }} }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Line:
    """One line of output, with its control sequences. `at_s` is the time from the command's start to the end
    of the line, in seconds.
    """

    at_s: float
    text: str


def record(command: Sequence[str]) -> list[Line]:
    """Run a command in a pseudo-terminal, and return the lines that it prints. Raise CalledProcessError if it fails."""
    terminal, inner = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=inner, stderr=subprocess.PIPE, env=environment) as process:
        os.close(inner)
        lines = [Line(time.monotonic() - started_s, text) for text in _lines(terminal)]
        errors = process.stderr.read() if process.stderr else b""
    os.close(terminal)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors.decode())
    return lines


def _lines(terminal: int) -> Iterator[str]:
    rest = b""
    while chunk := _read(terminal):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode().rstrip("\r") for line in lines)
    if rest:
        yield rest.decode()


def _read(terminal: int) -> bytes:
    """Return output, or b"" after the last process has closed the pseudo-terminal. Reading then raises an
    error.
    """
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def svg(command: Sequence[str], lines: Sequence[Line]) -> str:
    """Return the picture of a terminal with the command and its output."""
    last_s = max(line.at_s for line in lines)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    starts = list[float]()
    for line in (Line(0.0, f"$ {shlex.join(command)}"), *lines):
        text = Text.from_ansi(line.text)
        starts += [line.at_s / last_s * PLAYED_S] * len(text.wrap(console, COLUMNS))
        console.print(text)
    title = f"{last_s:.0f} s, played in {PLAYED_S:.0f} s"
    return _animated(console.export_svg(title=title, code_format=FORMAT, unique_id="terminal"), starts)


def _animated(picture: str, starts: Sequence[float]) -> str:
    """Give each text that is clipped to `line-N` the time at which line N appears."""

    def timed(found: re.Match[str]) -> str:
        start_s = starts[min(int(found[1]), len(starts) - 1)]
        return f'{found[0]} style="animation: appear 1ms {start_s:.2f}s backwards"'

    return re.sub(r'clip-path="url\(#terminal-line-(\d+)\)"', timed, picture)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    options.file.write_text(svg(options.command, record(options.command)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
