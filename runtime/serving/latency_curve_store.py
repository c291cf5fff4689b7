"""The curves on disk: how fast one code with one snapshot is, by device and dtype. What is lost is learned again."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ...errors import SnapshotError
from ...snapshot.publish import publish
from ..batching.latency_curve import Point

MAX_POINTS = 64
# A median that moved by less, in seconds and as a share, is the one that is kept.
NEWS_S, NEWS = 0.001, 0.2
# Of revisions that are long gone: the files that were written longest ago are removed.
MAX_FILES = 500


class _Known(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size: float
    p50_s: float
    p95_s: float


_FILE = TypeAdapter(dict[str, list[_Known]])


class LatencyCurveStore:
    """Those of one revision. `read` and `write` block."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, list[Point]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, folder: Path, code: str, manifest: Path | None) -> LatencyCurveStore:
        """The file for this code, by its digest, and these weights: the same for every revision that has both."""
        digest = hashlib.sha256(code.encode())
        if manifest is not None:
            with contextlib.suppress(OSError):
                digest.update(manifest.read_bytes())
        curves = cls(folder / f"{digest.hexdigest()[:32]}.json")
        curves.read()
        return curves

    @property
    def known(self) -> bool:
        return bool(self._known)

    def at(self, traits: str) -> Sequence[Point]:
        """What is known of workers with these traits: their device and dtype."""
        return self._known.get(traits, ())

    def read(self) -> None:
        """Nothing is known if the file is not there, or is not what was written."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValidationError):
            found = _FILE.validate_json(self._path.read_bytes())
            self._known = {
                traits: [Point(point.size, point.p50_s, point.p95_s) for point in points[:MAX_POINTS]]
                for traits, points in found.items()
            }

    def news(self, traits: str, points: Sequence[Point]) -> bool:
        """Whether they say something else than what is kept: workers come and go often, and the disk is slow."""
        kept = self.at(traits)
        return len(kept) != len(points) or any(
            abs(new.p50_s - old.p50_s) > max(NEWS_S, NEWS * old.p50_s)
            for new, old in zip(points, kept, strict=True)
        )

    def write(self, traits: str, points: Sequence[Point]) -> None:
        """Keeps them. A disk that refuses is in nobody's way: they are measured again."""
        with self._lock, contextlib.suppress(OSError, SnapshotError):
            self._known[traits] = list(points)
            if self._path is None:
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = {
                name: [_Known(size=size, p50_s=p50, p95_s=p95) for size, p50, p95 in found]
                for name, found in self._known.items()
            }
            with publish(self._path) as stream:
                stream.write(_FILE.dump_json(known, indent=1))
            self._prune(self._path.parent)

    @staticmethod
    def _prune(folder: Path) -> None:
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)
