"""What was learned of sources: connections and latency, kept in one small JSON file. A lost file costs a tenth of a second."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import urlsplit

from .concurrency_control import MAX_CONNECTIONS, Habit

MAX_SOURCES = 256
MAX_FILE_BYTES = 1 << 20


def recall(file: Path, url: str) -> Habit | None:
    """The habit of the source at `url`; None if there is none, or the file cannot be read."""
    found = _read(file).get(_key(url))
    if not isinstance(found, dict):
        return None
    connections, latency_s = found.get("connections"), found.get("latency_s")
    if not isinstance(connections, int) or not 1 <= connections <= MAX_CONNECTIONS:
        return None
    if not isinstance(latency_s, float) or not math.isfinite(latency_s) or not 0 <= latency_s <= 60:
        return None
    return Habit(connections, latency_s)


def remember(file: Path, url: str, habit: Habit) -> None:
    """Keep `habit`. Two that write at once: one is forgotten. A folder that cannot be written: both are."""
    known = _read(file)
    known.pop(_key(url), None)
    known[_key(url)] = {"connections": habit.connections, "latency_s": float(habit.latency_s)}
    kept = dict(list(known.items())[-MAX_SOURCES:])
    try:
        with NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
            json.dump(kept, stream)
        Path(stream.name).replace(file)
    except OSError:
        return


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            known = json.loads(stream.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _key(url: str) -> str:
    """Host or bucket: what is behind one of them behaves alike. Folders are told apart by device."""
    parts = urlsplit(url)
    if parts.scheme in {"s3", "http", "https"}:
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    try:
        return f"device {os.stat(url).st_dev}"  # noqa: PTH116  no Path: the URL of a folder is text
    except OSError:
        return "folder"
