"""Defines the options and arguments that several commands share. Each is a decorator."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ....errors import CodeError, GatewayError, PilotflameError
from ....snapshot.sources.locate import is_remote
from ....snapshot.sources.variables import OWN_NAMES
from . import display
from .address import CA_VARIABLE, DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from ...ground.settings.gateway_settings import GatewaySettings

F = TypeVar("F", bound=Callable[..., Any])

CONFIG_VARIABLE = "PILOTFLAME_CONFIG"
STATE_VARIABLE = "PILOTFLAME_STATE_DIR"
INPUT_FILE = "test_input.json"
_DURATION = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, one value a line.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
limit = click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, help="How many to show.")
_FOLDER = click.Path(file_okay=False, path_type=Path)
state_dir = click.option("--state-dir", type=_FOLDER, help="The gateway's state folder.")
config = click.option(
    "--config", envvar=CONFIG_VARIABLE, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Read the gateway's settings from a TOML file; variables and options win.",
)  # fmt: skip
_snapshot = click.option(
    "--snapshot",
    metavar="WEIGHTS",
    help="Use these weights: a folder, a .safetensors file, or a URL as s3://, hf://, oci://, https://.",
)
_settings = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="Override a setting of pilotflame.toml, for example scale.max=8 or env.MODE=fast. Repeatable.",
)  # fmt: skip
_url = click.option(
    "--url", envvar=URL_VARIABLE, default=DEFAULT_URL, show_envvar=True,
    help="The gateway's address.",
)  # fmt: skip
_api_key = click.option(
    "--api-key", envvar=KEY_VARIABLE, show_envvar=True, metavar="KEY", default="", show_default=False,
    help="The API key to send. Prefer the variable: a list of processes shows command lines.",
)  # fmt: skip
_name = click.option("--name", metavar="NAME", help="Use this name instead of the one in pilotflame.toml.")


class Moment(click.ParamType[float]):
    """A point in time: a duration before now (30s, 10m, 2h, 3d), or a date and time such as 2026-11-22T10:00."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the point in time as Unix time in seconds. A time without a zone is in this machine's zone."""
        if (age_s := seconds_of(value)) is not None:
            return time.time() - age_s
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time. Write 10m, 2h, 3d or 2026-11-22T10:00.", param, ctx)


def complete_functions(context: click.Context, _parameter: click.Parameter, beginning: str) -> list[str]:
    """Return the names of the gateway's functions for shell completion, or no names if no gateway answers."""
    from .client import Client  # noqa: PLC0415
    from .connection import COMPLETION_TIMEOUT  # noqa: PLC0415

    url = context.params.get("url") or os.environ.get(URL_VARIABLE, DEFAULT_URL)
    key = context.params.get("api_key") or os.environ.get(KEY_VARIABLE, "")
    with contextlib.suppress(PilotflameError), Client(url, api_key=key, timeout=COMPLETION_TIMEOUT) as client:
        names = [function["name"] for function in client.get("v1", "functions")["functions"]]
        return [name for name in names if name.startswith(beginning)]
    return []


function = click.argument("name", shell_complete=complete_functions)


def states(option: str, kind: type[StrEnum]) -> Callable[[F], F]:
    """Return a decorator that adds an option to select by state. The selected states are passed as `states`."""
    choice = click.Choice(list(kind), case_sensitive=False)
    return click.option(option, "states", multiple=True, type=choice, help="Only this one; repeatable.")


def gateway_address(command: F) -> F:
    """Add --url and --api-key, and pass them as `url` and `api_key`."""
    return _url(_api_key(command))


def gateway(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url, --api-key and --json. Pass `as_json`, and a `client` that is closed after the command."""

    @functools.wraps(command)
    def connected(*, url: str, api_key: str, as_json: bool, **values: Any) -> Any:
        # The import of httpx takes 50 ms, and `pilotflame dev` does not need it.
        from .client import Client  # noqa: PLC0415

        with Client(url, api_key=api_key, on_wait=_say_nothing if as_json else display.say) as client:
            return command(client=client, as_json=as_json, **values)

    return gateway_address(as_json(connected))


def _say_nothing(_text: str) -> None:
    """Print nothing: with --json, an error must be the only line on stderr."""


class FunctionSource(NamedTuple):
    """A function's folder, and the settings for the function on the command line."""

    folder: Path
    settings: tuple[str, ...] = ()
    name: str | None = None
    snapshot: str | None = None

    def overrides(self, *, local: bool = True) -> dict[str, str]:
        """Return the settings on the command line. Raise BadParameter if a setting is not KEY=VALUE.

        If `local`, the gateway runs on this machine and needs the absolute path of a snapshot.
        """
        found: dict[str, str] = {}
        for text in self.settings:
            key, sign, value = text.partition("=")
            if not sign or not key:
                wrong = f"{text!r} is not KEY=VALUE, for example scale.max=8."
                raise click.BadParameter(wrong, param_hint="'--set'")
            found[key] = value
        if self.name is not None:
            found["name"] = self.name
        if self.snapshot is not None:
            keep = not local or is_remote(self.snapshot)
            found["snapshot"] = self.snapshot if keep else str(Path(self.snapshot).expanduser().resolve())
        return found


def function_source(command: Callable[..., Any], *, default: str | None = ".") -> Callable[..., Any]:
    """Add [FOLDER], --set, --name and --snapshot, and pass them as `source`.

    If `default` is None and the user omits FOLDER, `source` is None.
    """

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        given = [values.pop(field) for field in FunctionSource._fields]
        if given[0] is None and any(given):
            raise click.UsageError("--set, --name and --snapshot need the FOLDER of a function.")
        return command(source=FunctionSource(*given) if given[0] is not None else None, **values)

    existing = click.Path(exists=True, file_okay=False, path_type=Path)
    folder = click.argument("folder", type=existing, default=default, required=False)
    return folder(_settings(_name(_snapshot(run))))


def model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --model and --output. If --model is given, `source` becomes the folder that is written for that model."""

    @functools.wraps(command)
    def run(*, source: FunctionSource, model: str | None, output: Path | None, **values: Any) -> Any:
        if model is not None:
            # The import takes time, and a deploy without --model does not need it.
            from .model_template import write_function  # noqa: PLC0415

            if source.folder != Path():
                raise click.UsageError("--model makes its own FOLDER; name that with --output.")
            source = source._replace(folder=write_function(model, output, source.name or ""))
            display.say(f"made {source.folder} for {model}: its handler.py is yours to change")
        elif output is not None:
            raise click.UsageError("--output needs --model.")
        return command(source=source, **values)

    of = click.option(
        "--model",
        metavar="MODEL",
        help="Deploy a model without code: its folder, hf://ORG/NAME or s3://BUCKET/PREFIX.",
    )
    to = click.option(
        "--output", type=_FOLDER, help="With --model: the new folder; by default named for the model."
    )
    return of(to(run))


optional_source = functools.partial(function_source, default=None)


@contextlib.contextmanager
def gateway_defaults(*, standalone: bool, state_dir: Path | None) -> Iterator[dict[str, Any]]:
    """Yield defaults for the gateway's settings: a platform's $PORT or $AIP_HTTP_PORT, and temporary folders.

    The container of a `standalone` function usually has no home. So unless the user names a state folder, the state is in a
    temporary folder, which is deleted at the end. If the home is not writable, the temporary folder also has the cache.
    """
    # Vertex AI sets AIP_HTTP_PORT. Other platforms set PORT.
    found = os.environ.get("PORT") or os.environ.get("AIP_HTTP_PORT")
    port = {"port": found} if found else {}
    if not standalone or state_dir is not None or STATE_VARIABLE in os.environ:
        yield port
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="pilotflame-"))
        except OSError as error:
            remedy = "Mount a tmpfs at /tmp, or give --state-dir."
            raise GatewayError(f"There is no folder for the state: {error}.", remedy=remedy) from None
        cache = {} if _has_writable_home() else {"cache_dir": Path(folder) / "snapshots"}
        yield {**port, **cache, "state_dir": Path(folder) / "state"}


def _has_writable_home() -> bool:
    try:
        return os.access(Path.home(), os.W_OK)
    except RuntimeError:
        return False


def withheld(folder: Path) -> list[str]:
    """Return a warning if files in a function's folder are not deployed because they look like credentials."""
    # The import takes time, and only commands that read a function's folder need it.
    from ...node.packaging.code import IGNORE_FILE, withheld  # noqa: PLC0415

    found = withheld(folder)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    how = f"to deploy one, write !NAME into {IGNORE_FILE}, or better: pilotflame secrets set"
    return (
        [f"not deployed, since they look like credentials: {', '.join(found[:5])}{more}; {how}"]
        if found
        else []
    )


def gateway_settings(
    *, config: Path | None = None, defaults: Mapping[str, Any] | None = None, **overrides: Any
) -> GatewaySettings:
    """Return the gateway's settings. Without `config`, the variable PILOTFLAME_CONFIG may name their file.

    `defaults` replace the settings' own defaults. `overrides` that are not None win over the file and the environment.
    """
    # The import of pydantic takes time, and --help does not need it.
    from ...ground.settings.gateway_settings import read_gateway_settings  # noqa: PLC0415

    if config is None and (named := os.environ.get(CONFIG_VARIABLE)):
        config = Path(named)
    other = (URL_VARIABLE, KEY_VARIABLE, CONFIG_VARIABLE, CA_VARIABLE, *OWN_NAMES)
    return read_gateway_settings(
        os.environ, config=config, other_variables=other, defaults=defaults or {}, **overrides
    )


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as 90s, 5m, 12h, 30d or 2w. Return None if `text` is not a duration."""
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _UNITS_S[match[2]] if match is not None else None


def event_body(event: str | None) -> bytes:
    """Return the bytes of an EVENT argument: its own text, the content of the file for @FILE, or stdin for `-`."""
    if event is None:
        return b""
    if event == "-":
        return sys.stdin.buffer.read()
    if not event.startswith("@"):
        return os.fsencode(event)
    return read_event(Path(event[1:]), remedy="Check the path after the @.")


def read_event(file: Path, *, remedy: str) -> bytes:
    """Return the content of a file. Raise CodeError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise CodeError(f"{file} cannot be read: {error.strerror}.", remedy=remedy) from None


def check_terminal() -> None:
    """Raise UsageError if stdin is not a terminal. Then the command cannot ask for confirmation."""
    if not sys.stdin.isatty():
        raise click.UsageError("Not a terminal, so cannot ask for confirmation. Pass --yes.")
