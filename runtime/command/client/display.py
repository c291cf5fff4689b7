"""Prints results on stdout (as JSON, text or tables), and messages and progress on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ...ground.telemetry.log_files import printable, printable_json
from ...ground.telemetry.timeline import COLD_START_PHASES

if TYPE_CHECKING:
    from rich.console import Console

    from .client import InvokeReply

BAR_COLUMNS = 40
# If the output is not a terminal, tables and messages have this width in characters.
WIDTH_WITHOUT_TERMINAL = 200
# On a terminal, an indented JSON answer must have fewer characters than this. A longer answer, such as an embedding,
# would fill too many lines, so it is not indented.
INDENTED_CHARS = 4_000
OWN = "pilotflame"
"""The dialect of pilotflame's own handlers."""


def style(text: str, **how: Any) -> str:
    """Return a styled text, for `echo` or `say` with `raw`. Control characters in `text` are escaped. `how` has the arguments of `click.style`."""
    return click.style(printable(text), **how) if text else ""


def echo(text: str = "", *, nl: bool = True, raw: bool = False) -> None:
    """Print a text on stdout. If `raw`, do not escape its control characters. If stdout is not a terminal, leave out styles."""
    click.echo(text if raw else printable(text), nl=nl)


def say(text: str, *, raw: bool = False) -> None:
    """Print a line on stderr. If `raw`, do not escape its control characters."""
    click.echo(text if raw else printable(text), err=True)


def function_trace(trace: str) -> str:
    """Return the traceback of a function's error. Its first line says that the function raised it, not this command."""
    return trace.rstrip().replace("Traceback (", "The function's traceback (")


def warn(texts: Sequence[str]) -> None:
    for text in texts:
        say(f"warning: {text}")


def tell_dialect(deployed: Mapping[str, Any]) -> None:
    """Name the dialect of a handler that is not pilotflame's own."""
    if (dialect := deployed.get("dialect", OWN)) != OWN:
        say(f"recognised a handler of {dialect}: {deployed['entry']}")


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout."""
    echo(json_text(value))


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON without control characters. Unless stdout has a UTF encoding, the JSON is ASCII."""
    lacks = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    return printable_json(json.dumps(value, ensure_ascii=lacks, indent=indent))


def print_result(value: Any, text: str, *, as_json: bool) -> None:
    """Print `value` as JSON, or `text` for people."""
    if as_json:
        print_json(value)
    else:
        echo(text)


def print_list(
    value: Any, columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str, as_json: bool
) -> None:
    """Print `value` as JSON, or `rows` as a table for people. Without rows, print `empty` on stderr."""
    if as_json:
        print_json(value)
    elif found := list(rows):
        print_table(columns, found)
    else:
        say(empty)


def reply_facts(answer: Any, reply: InvokeReply) -> dict[str, Any]:
    """Return the facts about an invocation for --json. An answer of bytes is decoded as UTF-8."""
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer
    return {"answer": text, "cold": reply.cold, "timing_ms": reply.timing_ms, "worker": reply.worker}


def print_answer(answer: Any) -> None:
    """Print a function's answer: bytes unchanged, JSON on one line. On a terminal, indent a short JSON answer, and
    escape control characters.
    """
    terminal = sys.stdout.isatty()
    if isinstance(answer, bytes):
        return echo(answer.decode("utf-8", "replace"), nl=False) if terminal else click.echo(answer, nl=False)
    indented = json_text(answer, indent=2) if terminal else ""
    return echo(indented) if 0 < len(indented) < INDENTED_CHARS else print_json(answer)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, apart: bool = False) -> None:
    """Print a table without borders. If `apart`, first print an empty line. Align columns of numbers to the right."""
    if apart:
        echo()
    right = [
        bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        for index in range(len(columns))
    ]
    texts = [list(columns), *([printable(text) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    # Use rich only to fold texts, or if a character may not fill exactly one column, because rich takes a millisecond for each row.
    plain = all(text.isascii() and text.isprintable() for row in texts for text in row)
    if not plain or sum(widths) + 2 * (len(widths) - 1) > _columns():
        return _print_folded(texts, right)
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in texts
    ]
    return echo("\n".join([click.style(lines[0], bold=True), *lines[1:]]), raw=True)


def _print_folded(texts: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Print a table whose first row is its head. Fold the texts that do not fit."""
    # The import of rich takes time, and --help does not need it.
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, to_right in zip(texts[0], right, strict=True):
        table.add_column(column, justify="right" if to_right else "left", overflow="fold")
    for row in texts[1:]:
        table.add_row(*row)
    _console(err=False).print(table)


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL


def print_timing(reply: InvokeReply) -> None:
    """Print the phases of one invocation as bars on stderr."""
    phases = {name: ms for name, ms in reply.timing_ms.items() if name != "total"}
    total = milliseconds(reply.timing_ms.get("total", sum(phases.values())))
    waited_ms = sum(phases.get(name, 0.0) for name in COLD_START_PHASES)
    start = f"cold start {milliseconds(waited_ms)}, with the call" if reply.cold else "warm,"
    say(f"{start} {total} in all, worker {reply.worker or '-'}")
    longest_ms = max(phases.values(), default=0.0) or 1.0
    for name, ms in phases.items():
        eighths = round(max(0.0, ms / longest_ms) * BAR_COLUMNS * 8)
        bar = "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
        say(f"  {name:<9} {milliseconds(ms):>10}  {bar}".rstrip())


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms / 1000:.2f} s" if ms >= 10_000 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def local_time(at: str | float) -> str:
    """Return an ISO 8601 time or a Unix time as date and time of this machine, with milliseconds."""
    moment = datetime.fromisoformat(at) if isinstance(at, str) else datetime.fromtimestamp(at, UTC)
    return moment.astimezone().isoformat(" ", "milliseconds")[:23]


def age(moment: str) -> str:
    """Return the time that has passed since `moment`, an ISO 8601 time, in its largest units, such as `2 h 5 min`."""
    return duration((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())


def duration(seconds: float) -> str:
    """Return a number of seconds in its largest units: 45 s, 3 min, 2 h 5 min, 4 d 3 h."""
    minutes = int(max(0.0, seconds)) // 60
    if not minutes:
        return f"{max(0.0, seconds):.0f} s"
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def snapshots(found: dict[str, Any]) -> str:
    """Return where the weights are, according to the gateway's description of a function or revision, or "" if it has none."""
    return found["snapshot"] or ", ".join(
        f"{name} = {where}" for name, where in found.get("snapshots", {}).items()
    )


def size(count: float) -> str:
    """Return a number of bytes in its largest unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: `1 stall`, `2 stalls`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def spinner(text: str) -> AbstractContextManager[object]:
    """Show a spinner while the block runs, if stderr is a terminal."""
    console = _console(err=True)
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def deploying(folder: str, url: str, *, quiet: bool) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Yield a callback that shows the events of a deploy on stderr: the function with its gateway's `url`, and each step with its time.

    On a terminal, the events are shown as they happen, and a spinner names the step that runs. Otherwise they are shown
    at the end, and only if the deploy succeeds, because a command that fails prints only its error. Notes are always
    shown at once. If `quiet`, nothing is shown.
    """
    console, lines = _console(err=True), list[str]()
    live = console.is_terminal and not quiet
    with console.status(f"deploying {folder}") if live else nullcontext() as status:

        def show(name: str, told: dict[str, Any]) -> None:
            if name == "note":
                # A note says why the deploy takes long, so it must appear during the deploy.
                return None if quiet else console.print(printable(f"  {told['text']}"), markup=False)
            if (line := _deploy_line(name, told, url)) is None:
                return status.update(f"{told['name']} …") if status is not None else None
            return console.print(printable(line)) if live else lines.append(line)

        yield show
    for line in () if quiet else lines:
        say(line)


def _deploy_line(event: str, told: dict[str, Any], url: str) -> str | None:
    """Return the line that shows an event of a deploy, or None for the event that reports the beginning of a step."""
    if event == "function":
        return f"{_target(told['name'], told['replaces'])} at {url}"
    return None if told["seconds"] is None else f"  {told['name']:<12}{told['seconds']:>8.2f} s"


def _target(name: str, replaced: dict[str, Any] | None) -> str:
    """Return a line that names the function that a deploy creates or updates. `replaced` is its live revision."""
    if replaced is None:
        return f"creates {name}"
    key = replaced["deployed_by"]
    by = "deployed without a key" if key == "local" else f"deployed by {key}"
    return f"updates {name} (revision {replaced['number']}, {by})"


@contextmanager
def progress(text: str, *, in_bytes: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar with the time left, if stderr is a terminal.

    Yield the function that updates the bar, with the arguments `done`, `total` and `note`. With `in_bytes`, the bar
    shows the number of bytes and the rate. Otherwise it shows a percentage and the text `note`.
    """
    from rich import progress as bars  # noqa: PLC0415

    console = _console(err=True)
    rate = (bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn())
    measures = rate if in_bytes else (bars.TaskProgressColumn(), bars.TextColumn("{task.fields[note]}"))
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *measures, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(text, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


def _console(*, err: bool) -> Console:
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=err, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console
