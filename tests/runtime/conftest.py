"""Fixtures of the command line's tests: commands, as processes and in this process, and one gateway for all commands."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pilotflame.runtime.cli import main

COMMAND = [sys.executable, "-m", "pilotflame.runtime.cli"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PILOTFLAME_")}
    return {**kept, "HF_HUB_OFFLINE": "1", **variables}


@contextmanager
def _default_interrupt() -> Iterator[None]:
    """Let processes that start in the block end on SIGINT. Otherwise they inherit it as ignored from tests that a
    script started with `nohup` or `&`.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def started(*arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process that ends with the block."""
    with _default_interrupt():
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(**variables), start_new_session=True,
        )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A folder whose path is short enough for the paths of unix sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="pfc-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def served(short_tmp: Path) -> Iterator[str]:
    """The address of a gateway that `pilotflame serve` runs."""
    with serving(short_tmp / "served", PILOTFLAME_WEBHOOK_NETWORKS="127.0.0.0/8") as url:
        yield url


@pytest.fixture(scope="session")
def served_for_cog(short_tmp: Path) -> Iterator[str]:
    """The address of a gateway whose only plugin is `cog`."""
    with serving(short_tmp / "cog", PILOTFLAME_PLUGINS="cog") as url:
        yield url


@contextmanager
def serving(state: Path, **variables: str) -> Iterator[str]:
    arguments = ("serve", "--json", "--port", 0, "--state-dir", state, "--drain", 5)
    with started(*arguments, **variables) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts commands that run until the test ends: `start("logs", "-f", "hello", PILOTFLAME_URL=…)`."""
    with ExitStack() as stack:
        yield lambda *arguments, **variables: stack.enter_context(started(*arguments, **variables))


@pytest.fixture
def run() -> Run:
    """Runs a command to its end: `run("list", PILOTFLAME_URL=…)`."""

    def ran(*arguments: object, given: bytes = b"", **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=given, capture_output=True, env=environment(**variables), timeout=60, check=False,
        )  # fmt: skip
        said = done.stderr.decode()
        assert "Traceback" not in said, said
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), said)

    return ran


class Stdin(io.TextIOWrapper):
    """The standard input of a command. It may seem to be a terminal."""


@pytest.fixture
def run_here(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` in this process: a new process would take 0.3 s for its imports. With `person`, stdin seems to be a terminal."""

    def ran(
        *arguments: object, given: bytes = b"", person: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("PILOTFLAME_")]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", Stdin(io.BytesIO(given)))
            patch.setattr(sys.stdin, "isatty", lambda: person)
            words = [str(argument) for argument in arguments]
            code = main(words)
            captured = capsysbinary.readouterr()
        out, said = (stream.decode("utf-8", "replace") for stream in captured)
        assert "Traceback" not in said, said
        return subprocess.CompletedProcess(words, code, out, said)

    return ran


@pytest.fixture
def pilotflame(run_here: Run, served: str) -> Run:
    """`run_here`, with the gateway `served`."""
    return lambda *arguments, **how: run_here(*arguments, **{"PILOTFLAME_URL": served, **how})


@pytest.fixture
def deployed(pilotflame: Run, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Deploys a handler's source, and returns the function's name. The function is deleted when the test ends."""
    names: list[str] = []

    def deploy(source: str, *arguments: object) -> str:
        name = f"t{len(names)}-{tmp_path.name.lower().replace('_', '-')}"[:60].strip("-")
        folder = tmp_path / name
        folder.mkdir()
        (folder / "handler.py").write_text(source)
        done = pilotflame("deploy", folder, "--name", name, *arguments)
        assert done.returncode == 0, done.stderr
        names.append(name)
        return name

    yield deploy
    for name in names:
        pilotflame("delete", name, "--yes")
