"""Fixtures of the cache's tests: a small snapshot in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.snapshot.format.manifest import Manifest
from pulling import make


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of a snapshot."""
    make(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def manifest(source: Path) -> Manifest:
    """The manifest of the snapshot in `source`."""
    return Manifest.read(source)
