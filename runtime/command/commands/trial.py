"""The command that calls a function once in a gateway of its own: `pilotflame test`."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

from ....errors import CodeError, GatewayError, InvocationError
from ...ground.telemetry.logs import OWN_SOURCES
from ..client import display, options
from ..client.client import Client

START_TIMEOUT_S = 60.0
DRAIN_S = 5.0
STOP_TIMEOUT_S = 15.0
LOG_LINES = 20
PRINTED_LINES = 200
# The gateway does not inherit these variables. So it asks for no API key and has no certificate. It needs neither, because
# only this process knows its address.
AUTH_VARIABLES = ("PILOTFLAME_AUTH", "PILOTFLAME_TLS_CERT", "PILOTFLAME_TLS_KEY", options.CONFIG_VARIABLE)
_PR_SET_PDEATHSIG = 1
# The module of the command line. `_started` runs it with `python -m`.
_PROGRAM = f"{__name__.partition('.command.')[0]}.cli"


@click.command()
@options.function_source
@click.option("--install", is_flag=True, help="Install requirements.txt first.")
@options.as_json
def test(*, source: options.FunctionSource, install: bool, as_json: bool) -> None:
    """Deploy FOLDER in a temporary gateway, send it test_input.json, and print the answer.

    The output of the function is also shown. The exit code is 0 if the function answered, 1 if it could not be deployed
    or failed. Leaves nothing behind.

    Example: pilotflame test hello
    """
    file = source.folder / options.INPUT_FILE
    remedy = "Write the event to send into it, as JSON."
    event = options.read_event(file, remedy=remedy)
    try:
        json.loads(event)
    except ValueError as error:
        raise CodeError(f"{file} is not JSON: {error}.", remedy=remedy) from None
    if not as_json:
        display.warn(options.withheld(source.folder))
    with display.spinner(f"testing {source.folder}"), private_gateway() as url, Client(url) as client:
        deployed = client.deploy(source.folder, source.overrides(), install=install)
        try:
            with client.call(deployed["name"], event) as reply:
                answer = reply.value()
            printed = _printed(client, deployed["name"])
        except InvocationError as error:
            found = client.logs(deployed["name"], lines=LOG_LINES)
            lines = [line["text"] for line in found if line["level"] != "error"]
            # Put the end of the log into the error, because the log is deleted with the temporary gateway.
            if lines and (not error.remedy or "pilotflame logs" in error.remedy):
                error.remedy = "The end of its log: " + " | ".join(lines)
            raise
    display.warn(deployed["warnings"])
    if not as_json:
        display.tell_dialect(deployed)
    if as_json:
        facts = display.reply_facts(answer, reply)
        return display.print_json(facts | {"warnings": deployed["warnings"], "printed": printed})
    for line in printed:
        display.say(f"printed | {line}")
    display.print_answer(answer)
    return display.print_timing(reply)


def _printed(client: Client, name: str) -> list[str]:
    """Return the last lines that the function printed, including lines from its imports."""
    found = client.logs(name, lines=PRINTED_LINES)
    return [line["text"] for line in found if line["source"] not in OWN_SOURCES]


@contextmanager
def private_gateway() -> Iterator[str]:
    """Run a gateway on a free port with a temporary state folder, and yield its URL. Stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-test-") as folder:
        log = Path(folder) / "gateway.log"
        with log.open("wb") as errors, _started(Path(folder) / "state", errors) as (process, announced):
            try:
                yield _wait_for_url(announced, log)
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextmanager
def _started(state_dir: Path, errors: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a gateway. Yield its process, and a pipe with its URL. The URL is not on stdout, where any code may print."""
    libc = ctypes.CDLL(None)
    where = ["--port", "0", "--host", _loopback(), "--state-dir", str(state_dir), "--drain", str(DRAIN_S)]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as announced:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, "serve", "--url-fd", str(writing), *where],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # With its own process group, the gateway does not get Ctrl-C from the terminal: this process gets it, and
                # stops the gateway. If this process is killed, the kernel sends SIGTERM to the gateway.
                process_group=0,
                pass_fds=(writing,),
                env={name: value for name, value in os.environ.items() if name not in AUTH_VARIABLES},
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  one thread here
            )
        finally:
            os.close(writing)
        with process:
            yield process, announced


def _loopback() -> str:
    """Return 127.0.0.1, or ::1 if this machine has only IPv6."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def _wait_for_url(announced: IO[bytes], log: Path) -> str:
    ready, _, _ = select.select([announced], [], [], START_TIMEOUT_S)
    line = announced.readline() if ready else b""
    if not line:
        text = " ".join(log.read_text(errors="replace").split())[-500:]
        why = "ended during its start" if ready else "did not start in time"
        raise GatewayError(f"The gateway of this test {why}: {text}", remedy="Run `pilotflame doctor`.")
    return line.decode().strip()
