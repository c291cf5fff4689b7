"""Reads traces: files with the arrival times of calls to one function or to several."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ....errors import CodeError

LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
TIME_COLUMN, FUNCTION_COLUMN = "timestamp", "function"


def read_trace(
    path: Path, *, time_column: str = TIME_COLUMN, function_column: str = FUNCTION_COLUMN
) -> dict[str, list[float]]:
    """Return the ascending times of the calls of each function in a file, in seconds after the file's first call.

    The file is CSV with a line of column names. If its name ends in .jsonl, .ndjson or .json, it has a JSON object or a
    bare time on each line. It may be compressed (.gz). Without a column of functions, all calls belong to one function,
    whose name is "". Raise CodeError if the file cannot be read or has no calls.
    """
    names = (time_column.lower(), function_column.lower())
    times: dict[str, list[float]] = defaultdict(list)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for moment, function in _rows(path, file, *names):
                times[function].append(_seconds(path, moment))
    except (OSError, EOFError, zlib.error, csv.Error, ValueError) as error:
        remedy = "Give a CSV file, or .jsonl, plain or .gz."
        raise CodeError(f"{path} cannot be read: {error}.", remedy=remedy) from None
    if not times:
        raise CodeError(f"{path} has no calls.", remedy="Give a file with one line for each call.")
    first_s = min(map(min, times.values()))
    return {function: sorted(at_s - first_s for at_s in found) for function, found in sorted(times.items())}


def split(arrivals: Iterable[float], functions: int, seed: int) -> dict[str, list[float]]:
    """Assign calls to functions at random. The functions' shares follow Zipf's law. Omit functions without calls."""
    # The random numbers must be repeatable. They do not need to be unpredictable.
    rnd = random.Random(seed)  # noqa: S311
    shares = [1 / (number + 1) for number in range(functions)]
    dealt: dict[str, list[float]] = defaultdict(list)
    for at_s in arrivals:
        number = rnd.choices(range(functions), shares)[0]
        dealt[f"{number + 1}"].append(at_s)
    return dict(dealt)


def _rows(path: Path, file: TextIO, time: str, function: str) -> Iterator[tuple[Any, str]]:
    """Yield the time and the function of each row."""
    if Path(path.name.removesuffix(".gz")).suffix in LINES_SUFFIXES:
        yield from _json_rows(path, file, time, function)
        return
    rows = csv.reader(file)
    header = [name.strip().lower() for name in next(rows, [])]
    if time not in header:
        remedy = "Its first line must name the columns, for example TIMESTAMP,ContextTokens."
        raise CodeError(f"{path} has no column named {time}.", remedy=remedy)
    at, of = header.index(time), header.index(function) if function in header else None
    for row in rows:
        if len(row) > max(at, of or 0):
            yield row[at], row[of] if of is not None else ""


def _json_rows(path: Path, file: Iterable[str], time: str, function: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            yield row, ""
            continue
        fields = {name.lower(): value for name, value in row.items()}
        if time not in fields:
            remedy = 'Write a JSON object a line, as {"timestamp": 1.5, "function": "embed"}.'
            raise CodeError(f"{path}, line {number}, has no field named {time}.", remedy=remedy)
        yield fields[time], str(fields.get(function, ""))


def _seconds(path: Path, moment: Any) -> float:
    text, seconds = str(moment), math.nan
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        seconds = found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    # A number such as 20231116 is also an ISO date. Read it as a number of seconds.
    with suppress(ValueError):
        seconds = float(text)
    if math.isfinite(seconds):
        return seconds
    remedy = "Write seconds, or a time such as 2023-11-16 18:15:46.68."
    raise CodeError(f"{path} has the timestamp {text!r:.60}, which is not a time.", remedy=remedy)
