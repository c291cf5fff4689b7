"""The display: numbers, tables and bars for people. Answers go to stdout, everything said about them to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

BAR_COLUMNS = 40
# What is not read on a terminal is not cut to the width of one.
WIDTH_WITHOUT_TERMINAL = 200
# An embedding set number by number below each other helps nobody.
READABLE_CHARS = 4_000

Progress = Callable[[int, int], None]


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


def printable(answer: Any) -> Any:
    """An answer as JSON can say it: bytes become text."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def print_answer(answer: Any) -> None:
    """A function's answer on stdout: bytes as they are; JSON on one line, or indented for a person."""
    if isinstance(answer, bytes):
        click.echo(answer, nl=False)
    elif (
        sys.stdout.isatty() and len(text := json.dumps(answer, ensure_ascii=False, indent=2)) < READABLE_CHARS
    ):
        click.echo(text)
    else:
        print_json(answer)


def log_line(line: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(line["at"], UTC).astimezone()
    return f"{at:%H:%M:%S}.{at.microsecond // 1000:03d} {line['source']:<12} {line['text']}"


def say(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)


def warn(texts: Sequence[str]) -> None:
    for text in texts:
        say(f"warning: {text}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """A table without lines; columns whose cells are numbers are set to the right."""
    from rich.table import Table  # noqa: PLC0415  rich takes time to import, and --help needs none of it

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        numbers = bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console(err=err).print(table)


def print_timing(timing_ms: Mapping[str, float], *, cold: bool, worker: str) -> None:
    """The phases of one invocation as bars, on stderr."""
    phases = {name: ms for name, ms in timing_ms.items() if name != "total"}
    total_ms = timing_ms.get("total", sum(phases.values()))
    say(f"{'cold start' if cold else 'warm'}, {milliseconds(total_ms)} in all, worker {worker or '-'}")
    longest_ms = max(phases.values(), default=0.0) or 1.0
    for name, ms in phases.items():
        say(f"  {name:<9} {milliseconds(ms):>10}  {bar(ms / longest_ms)}".rstrip())


def bar(share: float, columns: int = BAR_COLUMNS) -> str:
    """A bar of `share` of the columns, to an eighth of a column."""
    eighths = round(max(0.0, min(1.0, share)) * columns * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms / 1000:.2f} s" if ms >= 10_000 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def ago(moment: str) -> str:
    """How long ago an ISO 8601 moment was, as a person says it."""
    return lasting((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())


def lasting(seconds: float) -> str:
    """A duration in its largest units: 45 s, 3 min, 2 h 5 min, 4 d 3 h."""
    minutes = int(max(0.0, seconds)) // 60
    hours, days = minutes // 60, minutes // 1440
    if not minutes:
        return f"{max(0.0, seconds):.0f} s"
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if not days else f"{days} d {hours % 24} h"


def size(count: float) -> str:
    """Bytes as a person says them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows a spinner on a terminal while the block runs; elsewhere nothing."""
    console = _console(err=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextmanager
def progress(text: str) -> Iterator[Progress]:
    """A progress bar with size, rate and time left on a terminal; call what it gives with (done, total) bytes."""
    from rich import progress as parts  # noqa: PLC0415  see print_table

    console = _console(err=True)
    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.DownloadColumn(binary_units=True),
        parts.TransferSpeedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task(text, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def tally(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with time left on a terminal, for what is counted in something else than bytes: call what it gives with
    (done, total, what to say of it)."""
    from rich import progress as parts  # noqa: PLC0415  see print_table

    console = _console(err=True)
    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.TaskProgressColumn(),
        parts.TextColumn("{task.fields[said]}"),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task(text, total=None, said="")
        yield lambda done, total, said: shown.update(task, completed=done, total=total, said=said)


def _console(*, err: bool) -> Console:
    from rich.console import Console  # noqa: PLC0415  see print_table

    console = Console(stderr=err, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console
