"""The options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...errors import CodeError
from ...snapshot.sources.locate import is_remote

if TYPE_CHECKING:
    from .client import Client

F = TypeVar("F", bound=Callable[..., Any])

URL_VARIABLE = "PILOTFLAME_URL"
KEY_VARIABLE = "PILOTFLAME_API_KEY"
OTHER_VARIABLES = (URL_VARIABLE, KEY_VARIABLE)
"""Variables with our prefix that are not the gateway's settings."""

_KEY_META = "pilotflame.api_key"

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one line, for programs.")
snapshot = click.option(
    "--snapshot",
    metavar="PATH",
    help="The weights: a folder or .safetensors file; wins over pilotflame.toml.",
)
name = click.option(
    "--name", metavar="NAME", help="Deploy under this name instead of the one in pilotflame.toml."
)
settings = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="A setting that wins over pilotflame.toml, as scale.max=8 or env.MODE=fast. May be repeated.",
)  # fmt: skip


def gateway(command: F) -> F:
    """`--url`: which gateway to talk to; `--api-key`: as whom, which `connect` finds by itself."""
    command = click.option(
        "--api-key", envvar=KEY_VARIABLE, show_envvar=True, metavar="KEY", expose_value=False, callback=_keep_key,
        help="The key to send; better in the environment, where nobody sees it in a list of processes.",
    )(command)  # fmt: skip
    return click.option(
        "--url", envvar=URL_VARIABLE, default="http://127.0.0.1:8600", show_default=True, show_envvar=True,
        help="The gateway's address.",
    )(command)  # fmt: skip


def function_folder(command: F) -> F:
    """`[FOLDER]`: a function's folder, by default the current one."""
    return click.argument(
        "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default="."
    )(command)


def event_body(event: str | None) -> bytes:
    """The bytes of an EVENT: itself, of @FILE, or of standard input for -; none without it."""
    if event is None:
        return b""
    if event == "-":
        return sys.stdin.buffer.read()
    if not event.startswith("@"):
        return os.fsencode(event)
    try:
        return Path(event[1:]).read_bytes()
    except OSError as error:
        raise CodeError(
            f"{event[1:]} cannot be read: {error.strerror}.", remedy="Check the path after the @."
        ) from None


def connect(url: str) -> Client:
    from .client import Client  # noqa: PLC0415  httpx takes time to import, and --help needs none of it

    return Client(url, api_key=given_key())


def given_key() -> str:
    """The API key that the command was given; "" if none."""
    context = click.get_current_context(silent=True)
    return str(context.meta.get(_KEY_META, "")) if context is not None else ""


def _keep_key(context: click.Context, _option: click.Parameter, value: str | None) -> None:
    context.meta[_KEY_META] = value or ""


def overrides(
    settings: Sequence[str], function: str | None, snapshot: str | None, *, local: bool
) -> dict[str, str]:
    """The settings given on the command line. A snapshot's path is meant from here if the gateway is `local`."""
    given = dict(_pair(text) for text in settings)
    if function is not None:
        given["name"] = function
    if snapshot is not None:
        kept = not local or is_remote(snapshot)
        given["snapshot"] = snapshot if kept else str(Path(snapshot).expanduser().resolve())
    return given


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE, as in scale.max=8.", param_hint="'--set'")
    return key, value
