"""Traces: recorded arrivals, and curves as they are written on the command line."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from datetime import UTC, datetime
from pathlib import Path

from ...errors import CodeError

MOST = 1000
"""Of workers in one run."""
MICROSECONDS = 26
"""Characters of an ISO time to its sixth decimal: Python knows no further ones."""


def read_arrivals(path: Path) -> list[float]:
    """When each call came, in seconds after the first, ascending. Of a CSV file with a header, plain or .gz."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = csv.reader(file)
            header = [name.strip().lower() for name in next(rows, [])]
            if "timestamp" not in header:
                raise CodeError(
                    f"{path} has no column named timestamp.",
                    remedy="Its first line must name the columns, as TIMESTAMP,ContextTokens,GeneratedTokens.",
                )
            at = header.index("timestamp")
            times = sorted(_seconds(path, row[at]) for row in rows if len(row) > at)
    except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
        raise CodeError(f"{path} cannot be read: {error}.", remedy="Give a CSV file, plain or .gz.") from None
    if not times:
        raise CodeError(f"{path} has no calls.", remedy="Give a file with a line for each.")
    return [time - times[0] for time in times]


def _seconds(path: Path, text: str) -> float:
    wrong = CodeError(
        f"{path} has the timestamp {text!r}, which is no time.",
        remedy="Times are seconds, or as 2023-11-16 18:15:46.68.",
    )
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text[:MICROSECONDS])
        except ValueError:
            raise wrong from None
        seconds = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    if not math.isfinite(seconds):
        raise wrong
    return seconds


def read_curve(text: str) -> tuple[tuple[float, float], ...]:
    """(size, seconds) by "1:20.5,32:36": so many milliseconds for a batch of one, so many for one of 32."""
    try:
        points = tuple(
            sorted(
                (float(size), float(ms) / 1e3) for size, ms in (part.split(":") for part in text.split(","))
            )
        )
    except ValueError:
        points = ()
    sizes = [size for size, _ in points]
    if (
        not all(0 < number < math.inf for point in points for number in point)
        or not points
        or len(set(sizes)) < len(sizes)
    ):
        raise CodeError(
            f"{text!r} is no curve.", remedy="Write sizes and milliseconds, as 1:20.5,32:36; each size once."
        )
    return points


def read_counts(text: str) -> list[int]:
    """Numbers by "1,2,4" or "1-4"."""
    try:
        counts = [count for part in text.split(",") for count in _range(part)]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > MOST:
        raise CodeError(
            f"{text!r} are no numbers of workers.", remedy=f"Write 2, or 1,2,4, or 1-4; at most {MOST}."
        )
    return counts


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
