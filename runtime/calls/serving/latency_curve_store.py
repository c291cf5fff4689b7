"""Stores latency curves on disk. A curve shows how fast a handler's code is with its weights on a device."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from ....errors import SnapshotError
from ....snapshot.publish import publish
from ..batching.latency_curve import Point

# At most this many points of each curve are read from a file.
MAX_POINTS = 64
# Write curves seldom, because workers stop often, and disks are slow: only if a median changed by more than MIN_CHANGE_S
# seconds and by more than this share of the old median (MIN_CHANGE), or if the number of points changed.
MIN_CHANGE_S, MIN_CHANGE = 0.001, 0.2
# If there are more files than this, the oldest are removed: their revisions were replaced long ago.
MAX_FILES = 500
_FORMAT = TypeAdapter(dict[str, list[Point]])


class LatencyCurveStore:
    """The curves of one version of the code with its snapshots, in a JSON file. `open` and `write` do blocking I/O."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._curves: dict[str, list[Point]] = {}
        self._lock = threading.Lock()
        # A missing or damaged file counts as empty.
        with contextlib.suppress(OSError, ValidationError):
            stored = _FORMAT.validate_json(path.read_bytes())
            self._curves = {device: points[:MAX_POINTS] for device, points in stored.items()}

    @classmethod
    def open(cls, folder: Path, code: str, *manifests: Path) -> LatencyCurveStore:
        """Return the store that all revisions with the same code (and settings) and weights share."""
        digest = hashlib.sha256(code.encode())
        for manifest in manifests:
            with contextlib.suppress(OSError):
                digest.update(manifest.read_bytes())
        return cls(folder / f"{digest.hexdigest()[:32]}.json")

    @property
    def known(self) -> bool:
        return bool(self._curves)

    def of_device(self, device: str) -> Sequence[Point]:
        """Return the points of workers on `device`, which names the device and the dtype."""
        return self._curves.get(device, ())

    def latest(self) -> Sequence[Point]:
        """Return the points that were stored last, whatever their device is."""
        return next(reversed(self._curves.values()), ())

    def differs(self, device: str, points: Sequence[Point]) -> bool:
        """Return True if the points differ enough from the stored points to be written."""
        stored = self.of_device(device)
        return len(stored) != len(points) or any(
            abs(new.p50_s - old.p50_s) > max(MIN_CHANGE_S, MIN_CHANGE * old.p50_s)
            for new, old in zip(points, stored, strict=True)
        )

    def write(self, device: str, points: Sequence[Point]) -> None:
        """Store the points of a device. If they cannot be written to disk, they are kept in memory only."""
        with self._lock, contextlib.suppress(OSError, SnapshotError):
            # Move the device to the end: `latest` returns the last entry.
            self._curves.pop(device, None)
            self._curves[device] = list(points)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            stored = {name: [point._asdict() for point in curve] for name, curve in self._curves.items()}
            is_new = not self._path.exists()
            # Do not wait for the disk, because a file that a power loss has damaged counts as empty.
            with publish(self._path, durable=False) as stream:
                stream.write(orjson.dumps(stored, option=orjson.OPT_INDENT_2))
            # Count the files only after a new file was made, because there may be hundreds to look at.
            files = (
                sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
                if is_new
                else []
            )
            for old in files[:-MAX_FILES]:
                old.unlink(missing_ok=True)
