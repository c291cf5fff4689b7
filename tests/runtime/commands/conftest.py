"""Commands that run in the test's own process: starting a process takes longer than the command."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pilotflame.runtime.cli import main


class Stdin(io.TextIOWrapper):
    """What a command reads; it may seem to be a terminal."""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of the environment that the tests run in."""
    for name in [name for name in os.environ if name.startswith("PILOTFLAME_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in this process. `person`: standard input is a terminal."""

    def ran(
        *arguments: object, given: bytes = b"", person: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", Stdin(io.BytesIO(given)))
            patch.setattr(sys.stdin, "isatty", lambda: person)
            words = [str(argument) for argument in arguments]
            code = main(words)
            captured = capsysbinary.readouterr()
            out, errors = (stream.decode("utf-8", "replace") for stream in captured)
            return subprocess.CompletedProcess(words, code, out, errors)

    return ran
