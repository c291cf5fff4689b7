"""The trial: one function in a gateway of its own, called once. What `pilotflame test` runs."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ...errors import CodeError, GatewayError, InvocationError
from .client import Client, InvokeReply

INPUT_FILE = "test_input.json"
START_TIMEOUT_S = 60.0
DRAIN_S = 5.0
STOP_TIMEOUT_S = 15.0
LOG_LINES = 20
_PR_SET_PDEATHSIG = 1
AUTH_VARIABLE = "PILOTFLAME_AUTH"  # nobody but us finds this gateway, so it asks for no key


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What the function answered, and how it went."""

    answer: Any
    cold: bool
    timing_ms: dict[str, float]
    worker: str
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        answer = self.answer.decode("utf-8", "replace") if isinstance(self.answer, bytes) else self.answer
        return {**asdict(self), "answer": answer}


def run_trial(folder: Path, overrides: Mapping[str, str], *, install: bool = False) -> TrialOutcome:
    """Deploys `folder`, sends its test_input.json, gives the answer. Raises what went wrong."""
    event = _read_input(folder / INPUT_FILE)
    with private_gateway() as url, Client(url) as client:
        deployed = client.deploy(folder, overrides=overrides, install=install)
        try:
            with client.call(deployed["name"], event) as reply:
                return _outcome(reply, deployed["warnings"])
        except InvocationError as error:
            lines = [line["text"] for line in client.logs(deployed["name"], lines=LOG_LINES)]
            if lines and not error.remedy:
                error.remedy = "The end of its log: " + " | ".join(lines)
            raise


@contextmanager
def private_gateway() -> Iterator[str]:
    """A gateway on a free port with a state folder of its own; gives its address. Both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-test-") as folder:
        log = Path(folder) / "gateway.log"
        with log.open("wb") as errors:
            process = _start(Path(folder) / "state", errors)
        try:
            yield _wait_for_url(process, log)
        finally:
            _stop(process)


# By its full name, as `python -m` wants it.
_COMMAND_LINE = f"{__name__.rpartition('.')[0].rpartition('.')[0]}.cli"


def _start(state_dir: Path, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    command = [
        sys.executable,
        "-m",
        _COMMAND_LINE,
        "serve",
        "--json",
        "--port",
        "0",
        "--host",
        "127.0.0.1",
    ]
    return subprocess.Popen(
        [*command, "--state-dir", str(state_dir), "--drain", str(DRAIN_S)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        # Ctrl-C on the terminal is for us alone: we stop it. And should we be killed, it goes as well.
        process_group=0,
        env={name: value for name, value in os.environ.items() if name != AUTH_VARIABLE},
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  one thread here
    )


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    if process.stdout is None:
        raise TypeError("the gateway's output is not a pipe")
    line, end_s = b"", time.monotonic() + START_TIMEOUT_S
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end_s - time.monotonic()))
        data = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not data:
            said = " ".join(log.read_text(errors="replace").split())[-500:]
            why = "did not start in time" if not ready else "ended at its start"
            raise GatewayError(f"The gateway of this test {why}: {said}", remedy="Run `pilotflame doctor`.")
        line += data
    url: str = json.loads(line)["url"]
    return url


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _read_input(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CodeError(
            f"{file} cannot be read: {error.strerror}.", remedy="Put the event to send into it, as JSON."
        ) from None


def _outcome(reply: InvokeReply, warnings: list[str]) -> TrialOutcome:
    answer = reply.value()
    return TrialOutcome(answer, reply.cold, reply.timing_ms, reply.worker, warnings)
