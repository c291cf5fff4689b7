"""Latency curves on disk: how fast one code with one snapshot is, by device."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from ...errors import SnapshotError
from ...snapshot.publish import publish
from ..batching.latency_curve import Point

MAX_POINTS = 64
# A median that moved by less than both is not written: workers start and stop often, and disks are slow.
MIN_CHANGE_S, MIN_CHANGE = 0.001, 0.2
# The oldest files, which belong to revisions that are long gone, are removed.
MAX_FILES = 500


_FORMAT = TypeAdapter(dict[str, list[Point]])


class LatencyCurveStore:
    """The curves of one code and snapshot, in one JSON file. `open` and `write` block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._curves: dict[str, list[Point]] = {}
        self._lock = threading.Lock()
        # A file that is missing or damaged holds nothing.
        with contextlib.suppress(OSError, ValidationError):
            for device, points in _FORMAT.validate_json(path.read_bytes()).items():
                self._curves[device] = points[:MAX_POINTS]

    @classmethod
    def open(cls, folder: Path, code: str, manifest: Path | None) -> LatencyCurveStore:
        """Return the store of this code and these weights: the same for every revision that has both."""
        digest = hashlib.sha256(code.encode())
        if manifest is not None:
            with contextlib.suppress(OSError):
                digest.update(manifest.read_bytes())
        return cls(folder / f"{digest.hexdigest()[:32]}.json")

    @property
    def known(self) -> bool:
        return bool(self._curves)

    def of_device(self, device: str) -> Sequence[Point]:
        """Return the points of workers with this device and dtype."""
        return self._curves.get(device, ())

    def differs(self, device: str, points: Sequence[Point]) -> bool:
        """Return True if the points differ enough from the stored ones to be written."""
        stored = self.of_device(device)
        return len(stored) != len(points) or any(
            abs(new.p50_s - old.p50_s) > max(MIN_CHANGE_S, MIN_CHANGE * old.p50_s)
            for new, old in zip(points, stored, strict=True)
        )

    def write(self, device: str, points: Sequence[Point]) -> None:
        """Store the points. If the disk refuses, they are kept in memory only."""
        with self._lock, contextlib.suppress(OSError, SnapshotError):
            self._curves[device] = list(points)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stored = {name: [point._asdict() for point in curve] for name, curve in self._curves.items()}
            with publish(self._path) as stream:
                stream.write(orjson.dumps(stored, option=orjson.OPT_INDENT_2))
            _prune(self._path.parent)


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for old in files[:-MAX_FILES]:
        old.unlink(missing_ok=True)
