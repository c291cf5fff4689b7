"""Commands that run in the test's own process: starting a process takes longer than the command."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove pilotflame's settings from the environment of the tests."""
    for name in [name for name in os.environ if name.startswith("PILOTFLAME_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(run_here: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a command in this process."""
    return run_here


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The folder of a small model."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"first": np.zeros((300, 2), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder
