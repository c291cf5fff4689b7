"""The command line: `pilotflame`."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import click

from .._version import __version__
from ..errors import PilotflameError
from .command.client import display, exit_codes, options
from .command.client.gateway_start import announced_start
from .command.commands.first_process import become_child_of_init
from .command.commands.lazy_group import PluginGroup
from .ground.telemetry.log_files import LogLine
from .ground.telemetry.refusals import explained

if TYPE_CHECKING:
    from .ground.settings.gateway_settings import GatewaySettings

PROGRAM = "pilotflame"
_STDERR = 2
_FILE = click.Path(dir_okay=False, path_type=Path)
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
# Maps each command to its module in `commands`, and to the first sentence of its help.
COMMANDS = {
    "backup": ("backup", "Write functions, jobs, keys and secrets to FILE, also while the gateway serves."),
    "delete": ("functions", "Delete a function and all its revisions."),
    "demo": (
        "demo",
        "Time cold starts of a real model on this machine, and print where each millisecond went.",
    ),
    "deploy": ("functions", "Deploy FOLDER as a function, or as a new revision of it."),
    "doctor": ("doctor", "Check whether this machine has what functions need, and how fast it is."),
    "explain": ("explain", "List what the gateway decided about FUNCTION, with the figures behind it."),
    "init": ("init", "Make a new function's folder from a template."),
    "invoke": ("functions", "Call a function and print its answer."),
    "jobs": ("jobs", "List a function's jobs; get, cancel, retry or follow them."),
    "keys": ("keys", "Make, list and revoke API keys."),
    "list": ("functions", "List the functions, with their workers, requests and memory."),
    "logs": ("logs", "Print the log of a function, or of the gateway."),
    "pause": ("revisions", "Let a function run nothing until `pilotflame resume`."),
    "prefetch": ("functions", "Bring images and weights to the gateway's machine, ahead of cold starts."),
    "move": ("move", "Move the jobs, keys and secrets of a stopped gateway into the database of several."),
    "nodes": ("nodes", "List the gateways that share a database."),
    "reset": ("revisions", "Start workers of a function again at once, although the last starts failed."),
    "restart": ("revisions", "Replace a function's processes, without dropping a call."),
    "restore": ("backup", "Make a state folder from a backup in FILE."),
    "resume": ("revisions", "Let a paused function run again."),
    "revisions": ("revisions", "List a function's revisions, the newest first."),
    "rollback": ("revisions", "Make an older revision of a function live."),
    "run": ("jobs", "Submit a job and print its id."),
    "secrets": ("secrets", "Give a function secrets: environment variables whose values no command shows."),
    "settings": (
        "settings",
        "Describe the settings of functions and of the gateway: type, range, default, meaning.",
    ),
    "snapshot": ("snapshot", "Create, inspect, verify, copy and convert snapshots of weights."),
    "status": ("functions", "Show one function: revision, workers, settings, event sources, processes."),
    "test": ("trial", "Deploy FOLDER in a temporary gateway, send it test_input.json, and print the answer."),
    "usage": ("usage", "Show what functions have used and cost, and what always-on workers would have cost."),
    "warmup": ("functions", "Start workers now, ahead of the requests that will need them."),
    "webhooks": ("webhooks", "List deliveries of webhooks, send one again, show the secret that signs them."),
}


@click.group(cls=PluginGroup, lazy=COMMANDS, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="pilotflame")
def cli() -> None:
    """Functions that start when they are called, and cost nothing until then.

    \b
    Start here:
      pilotflame init hello        make a folder with handler.py
      pilotflame test hello        call it once, in a temporary gateway
      pilotflame serve             run the gateway; in another terminal:
      pilotflame deploy hello
      pilotflame invoke hello '{"name": "Ada"}' --timing

    \b
    Exit codes: 0 done, 1 it failed (one paragraph on stderr says what and why; with --json one line of
    JSON), 2 the command line is wrong, 3 no gateway answers, 4 the job that was waited for (or a line of a
    batch) failed, 130 interrupted.
    """


_url_as_json = click.option(
    "--json", "as_json", is_flag=True, help='Print {"url": ...} on stdout once it listens.'
)


def _gateway_options(command: Any) -> Any:
    port = click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free one.  [default: 8600]")
    host = click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
    return host(port(options.state_dir(options.config(command))))


@cli.command()
@options.optional_source
@_gateway_options
@click.option("--drain", "drain_s", type=float, metavar="SECONDS", help="Time for calls at shutdown.")
@click.option("--tls-cert", type=_FILE, help="Serve HTTPS, with the certificate chain in this PEM file.")
@click.option("--tls-key", type=_FILE, help="The PEM file with the key of --tls-cert.")
@click.option("--auth", type=click.Choice(["auto", "always"]), help="When to ask for keys.  [default: auto]")
@_url_as_json
@click.option("--url-fd", type=int, hidden=True, help="Write the URL to this descriptor once it listens.")
def serve(
    *, source: options.FunctionSource | None, as_json: bool, url_fd: int | None, state_dir: Path | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Run the gateway until Ctrl-C, and let running calls finish. With FOLDER, serve that function alone.

    Functions that were deployed before are there again, without workers. Every option is also an environment
    variable, such as PILOTFLAME_PORT, and a key of the --config file, and there are more: see
    `pilotflame settings`.

    With --auth auto the gateway asks for API keys if other machines can reach it, or if a key exists. It then
    answers only health checks without one; see `pilotflame keys`.

    A function without workers holds about 10 MiB if it is one line of code, and more with imports (`pilotflame list`).
    PILOTFLAME_REST_MB limits all of them, by default to an eighth of the memory: beyond it, calls wait for the imports again.

    With FOLDER it is what a container's image runs on Knative, Cloud Run or plain docker: `POST /` calls the function,
    /readyz answers 200 once a worker is ready, and SIGTERM drains. The platform starts and stops containers, and
    authenticates: callers need no key, but can change nothing. The port is that of $PORT.

    Example: pilotflame serve --port 8600
    """
    become_child_of_init()

    def listening(url: str) -> None:
        if url_fd is not None:
            with os.fdopen(url_fd, "w", encoding="ascii") as announced:
                announced.write(f"{url}\n")
        if as_json:
            return display.print_json({"url": url})
        what = f"serves {source.folder} on" if source is not None else "listens on"
        text = f"pilotflame {__version__} {what} {url}; its state is in {gateway.state_dir}"
        return _announce(gateway.log_format, text)

    standalone = source is not None
    form = os.environ.get("PILOTFLAME_LOG_FORMAT", "text")
    with _failing_in(form), options.gateway_defaults(standalone=standalone, state_dir=state_dir) as defaults:
        gateway = options.gateway_settings(state_dir=state_dir, defaults=defaults, **settings)
        if source is None:
            return _run(gateway, listening)
        overrides, folder = source.overrides(), source.folder.resolve()
        return _run(gateway, listening, folder=folder, overrides=overrides, standalone=True)


@cli.command()
@options.function_source
@_gateway_options
@_url_as_json
def dev(*, source: options.FunctionSource, as_json: bool, state_dir: Path | None, **settings: Any) -> None:
    """Run a gateway with the function in FOLDER, and deploy it again after each change.

    Like `serve`, with the function's log on this terminal. If a change cannot be deployed, the error is
    printed, and the last good revision keeps answering. Without --state-dir nothing is kept.

    Example: pilotflame dev hello
    """
    folder = source.folder.resolve()

    def listening(url: str) -> None:
        if as_json:
            display.print_json({"url": url})
        _announce(gateway.log_format, f"pilotflame: {url} serves {folder} and deploys its changes")
        display.warn(options.withheld(folder))

    with nullcontext(state_dir) if state_dir else TemporaryDirectory(prefix="pilotflame-dev-") as state:
        gateway = options.gateway_settings(state_dir=Path(state), **settings)
        _run(gateway, listening, folder=folder, overrides=source.overrides())


def _run(gateway: GatewaySettings, listening: Callable[[str], None], **how: Any) -> None:
    """Run the gateway with `main.run`, and announce its start to commands until it listens."""
    # The parent process may have blocked signals, such as the SIGTERM that ends the gateway, or ignored SIGCHLD. Undo both.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with announced_start(gateway.port) as started, _failing_in(gateway.log_format):
        # Import here, because this takes a second: --help does not need it, and other commands already see the announcement.
        from .ground.telemetry.gateway_log import MessageFormatter  # noqa: PLC0415
        from .main import run  # noqa: PLC0415

        # The handler of last resort prints messages that are logged before the gateway's log is open, and after its end.
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(MessageFormatter(gateway.log_format))

        def tell(url: str) -> None:
            started()
            listening(url)

        run(gateway, on_listening=tell, **how)


@contextmanager
def _failing_in(form: str) -> Iterator[None]:
    """Print an error that ends the gateway in the format of its log."""
    try:
        yield
    except (PilotflameError, OSError, RuntimeError, MemoryError, ExceptionGroup) as error:
        if form == "text" or (told := explained(error)) is None:
            raise
        _announce(form, str(told), "error")
        raise click.exceptions.Exit(exit_codes.ERROR) from None


def _announce(form: str, text: str, level: str = "info") -> None:
    """Print a line on stderr, in the format of the gateway's log."""
    in_log = LogLine(time.time(), "gateway", text, level).encode().decode().rstrip("\n")
    display.say(text if form == "text" else in_log)


def _open_standard_streams() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that the parent process has left closed.

    Otherwise the next files and sockets get these descriptors, and libraries write messages into them.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(opened, True)
    os.close(opened)
    # Python makes no stream for a closed descriptor. The gateway's children get the descriptor of sys.stderr.
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    # Escape letters of an answer that the encoding of the terminal, or of PYTHONIOENCODING, lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def main(arguments: list[str] | None = None) -> int:
    """Run one command line, by default the process's own, and return its exit code."""
    _open_standard_streams()
    # Keep httpx from importing its own command line, with rich and pygments, which no command needs. With None, this import fails, which httpx accepts.
    sys.modules.setdefault("httpx._main", cast("ModuleType", None))
    words = sys.argv[1:] if arguments is None else arguments
    return exit_codes.exit_code_of(
        lambda: cli.main(words, prog_name=PROGRAM, standalone_mode=False), as_json="--json" in words
    )


if __name__ == "__main__":
    sys.exit(main())
