"""The command line: `pilotflame`."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from .._version import __version__
from ..errors import GatewayUnreachable, PilotflameError
from .commands import display, options
from .commands.access import COMMANDS as ACCESS
from .commands.bulk import COMMANDS as BULK
from .commands.jobs import COMMANDS as JOBS
from .commands.recording import COMMANDS as RECORDING
from .commands.remote import COMMANDS as REMOTE_COMMANDS
from .commands.simulate import COMMANDS as SIMULATE
from .commands.snapshots import snapshot
from .commands.transfers import COMMANDS as TRANSFERS
from .commands.webhooks import COMMANDS as WEBHOOKS

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

HELP_OPTIONS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=HELP_OPTIONS)
@click.version_option(__version__, prog_name="pilotflame")
def cli() -> None:
    """Functions that start when they are called, and cost nothing until then.

    \b
    The shortest way in:
      pilotflame init hello        a folder with handler.py, to change
      pilotflame test hello        one call of it, in a gateway of its own
      pilotflame serve             the gateway; in another terminal:
      pilotflame deploy hello
      pilotflame invoke hello '{"name": "Ada"}' --timing

    \b
    Exit codes: 0 done, 1 it failed (one paragraph on stderr says what and why), 2 the command line is
    wrong, 3 no gateway answers, 4 the job that was waited for (or a line of a batch) failed, 130 interrupted.
    """


@cli.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--template", "-t", default="hello", show_default=True, help="What to start from.")
@click.option("--list", "listing", is_flag=True, help="List the templates and stop.")
@options.as_json
def init(*, folder: Path | None, template: str, listing: bool, as_json: bool) -> None:
    """Make a new function's folder from a template.

    FOLDER's last part becomes the function's name; without FOLDER it is the template's name.

    \b
    Example:
      pilotflame init my-embeddings --template text-embedding
    """
    from .commands.scaffold import scaffold, templates  # noqa: PLC0415

    if listing:
        rows = [(known.name, known.summary) for known in templates()]
        if as_json:
            return display.print_json(
                {"templates": [dict(zip(("name", "summary"), row, strict=True)) for row in rows]}
            )
        return display.print_table(("template", "what it is"), rows)
    target = folder or Path(template)
    name = scaffold(template, target)
    if as_json:
        return display.print_json({"name": name, "template": template, "folder": str(target.resolve())})
    click.echo(f"made {target} from {template}: read {target / 'README.md'}, then: pilotflame test {target}")
    return None


def _gateway_options(command: Any) -> Any:
    for option in (
        click.option("--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Where to keep everything."),
        click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.  [default: 8600]"),
        click.option("--host", help="Address to listen on.  [default: 127.0.0.1]"),
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command()
@_gateway_options
@click.option(
    "--drain", "drain_s", type=float, metavar="SECONDS", help="How long started calls may take at shutdown."
)
@click.option(
    "--auth", type=click.Choice(["auto", "always"]), help="Whether to ask for API keys.  [default: auto]"
)
@click.option("--json", "as_json", is_flag=True, help='Print {"url": ...} on stdout once it listens.')
def serve(
    *, host: str | None, port: int | None, state_dir: Path | None, drain_s: float | None, auth: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Run the gateway until Ctrl-C, then let it finish what it has started.

    What was deployed before is there again, at zero workers. Every option is also an environment variable:
    PILOTFLAME_HOST, PILOTFLAME_PORT, PILOTFLAME_STATE_DIR, PILOTFLAME_DRAIN_S, PILOTFLAME_MAX_BODY_BYTES.

    With --auth auto a gateway that others than this machine can reach, or for which a key was made, answers nothing
    but health to those without a key; see `pilotflame keys`.

    \b
    Example:
      pilotflame serve --port 8600
    """
    from .main import run  # noqa: PLC0415  aiohttp takes time to import, and --help needs none of it
    from .settings.gateway_settings import read_gateway_settings  # noqa: PLC0415

    settings = read_gateway_settings(
        os.environ,
        other_variables=options.OTHER_VARIABLES,
        host=host,
        port=port,
        state_dir=state_dir,
        drain_s=drain_s,
        auth=auth,
    )

    def listening(url: str) -> None:
        if as_json:
            display.print_json({"url": url})
        else:
            display.say(
                f"pilotflame {__version__} listens on {url}, and keeps its state in {settings.state_dir}"
            )

    run(settings, on_listening=listening)


@cli.command()
@options.function_folder
@options.settings
@options.name
@options.snapshot
@_gateway_options
def dev(
    *,
    folder: Path,
    settings: tuple[str, ...],
    name: str | None,
    snapshot: str | None,
    host: str | None,
    port: int | None,
    state_dir: Path | None,
) -> None:
    """Run a gateway with one function, deployed again whenever its FOLDER changes.

    It is the same gateway as `serve`, with the function's log on this terminal. A change that cannot be
    deployed is told, and the last good revision goes on answering. Without --state-dir nothing is kept.

    \b
    Example:
      pilotflame dev hello
      pilotflame invoke hello '{"name": "Ada"}'      (in another terminal)
    """
    from .main import run  # noqa: PLC0415  see serve
    from .settings.gateway_settings import read_gateway_settings  # noqa: PLC0415

    with ExitStack() as stack:
        kept = state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotflame-dev-")))
        gateway = read_gateway_settings(
            os.environ, other_variables=options.OTHER_VARIABLES, host=host, port=port, state_dir=kept
        )
        run(
            gateway,
            on_listening=lambda url: display.say(
                f"pilotflame: {url} serves {folder.resolve()}, and follows its changes"
            ),
            folder=folder.resolve(),
            overrides=options.overrides(settings, name, snapshot, local=True),
        )


@cli.command()
@options.function_folder
@options.settings
@options.name
@options.snapshot
@click.option("--install", is_flag=True, help="Install requirements.txt first, apart from this environment.")
@options.as_json
def test(
    *,
    folder: Path,
    settings: tuple[str, ...],
    name: str | None,
    snapshot: str | None,
    install: bool,
    as_json: bool,
) -> None:
    """Deploy FOLDER in a gateway of its own, send it test_input.json, print the answer.

    Exit code 0 if it answered, 1 if it could not be deployed or failed. Leaves nothing behind.

    \b
    Example:
      pilotflame test hello
    """
    from .commands.trial import run_trial  # noqa: PLC0415  httpx takes time to import, and --help needs none of it

    with display.waiting(f"testing {folder}"):
        outcome = run_trial(folder, options.overrides(settings, name, snapshot, local=True), install=install)
    display.warn(outcome.warnings)
    if as_json:
        return display.print_json(outcome.as_json())
    display.print_answer(outcome.answer)
    display.print_timing(outcome.timing_ms, cold=outcome.cold, worker=outcome.worker)
    return None


@cli.command()
@click.option(
    "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="The state folder to look at."
)
@options.as_json
def doctor(state_dir: Path | None, as_json: bool) -> None:
    """Look at this machine: is everything here that functions need, and how fast is it.

    Exit code 1 if something that is needed is missing; each line then says the remedy.

    \b
    Example:
      pilotflame doctor
    """
    from .commands.doctor import examine  # noqa: PLC0415
    from .settings.gateway_settings import read_gateway_settings  # noqa: PLC0415

    settings = read_gateway_settings(os.environ, other_variables=options.OTHER_VARIABLES, state_dir=state_dir)
    with display.waiting("looking around"):
        checks = list(examine(settings))
    if as_json:
        display.print_json({"checks": [check._asdict() for check in checks]})
    else:
        rows = [(check.verdict, check.name, check.found, check.remedy) for check in checks]
        display.print_table(("", "what", "found", "what to do"), rows)
    if any(check.verdict == "fail" for check in checks):
        raise click.exceptions.Exit(EXIT_ERROR)


for command in (*TRANSFERS, *RECORDING):
    snapshot.add_command(command)
for command in (*REMOTE_COMMANDS, *JOBS, *WEBHOOKS, *BULK, *ACCESS, *SIMULATE, snapshot):
    cli.add_command(command)


def main() -> None:
    """The console command."""
    sys.exit(run_command())


def run_command(arguments: list[str] | None = None) -> int:
    """Runs one command line (by default the process's own) and gives its exit code."""
    try:
        code = cli.main(arguments, prog_name="pilotflame", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE if isinstance(error, click.UsageError) else EXIT_ERROR
    except PilotflameError as error:
        display.say(f"error: {' '.join(str(error).split())}")
        return EXIT_UNREACHABLE if isinstance(error, GatewayUnreachable) else EXIT_ERROR
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:  # of a file that somebody named
        display.say(f"error: {error.filename or 'The system'}: {error.strerror or error}.")
        return EXIT_ERROR
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
