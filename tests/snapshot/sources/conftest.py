"""Fixtures of the tests of clouds: the tests ignore this machine's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FAMILIES = ("AWS_", "AZURE_", "BOTO_", "GOOGLE_", "HF_", "HUGGING", "PILOTFLAME_", "CLOUDSDK_")


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, profile or login of a cloud."""
    for name in [name for name in os.environ if name.upper().startswith(FAMILIES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no hub here"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no gcloud here"))
    # Skip the address of a machine's own service account: no server answers here.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
