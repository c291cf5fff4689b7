"""The commands of access: `pilotflame keys create|list|revoke`, `pilotflame secrets set|list|unset`."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import display, options

if TYPE_CHECKING:
    from .local_keys import Keys

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    Without --url and --api-key these commands go to the gateway of this machine's state folder, whether it runs or not,
    and need no key: that is how the first one is made.

    \b
    Example:
      pilotflame keys create laptop --scope admin
    """


@click.group()
def secrets() -> None:
    """Give a function secrets: environment variables that its workers have, and nobody is told.

    \b
    Example:
      pilotflame secrets set greeter API_TOKEN --from-file token.txt
    """


def _where(command: Any) -> Any:
    """`--state-dir`, `--url` and `--api-key`."""
    folder = click.Path(file_okay=False, path_type=Path)
    return click.option("--state-dir", type=folder, help="The state folder of the gateway on this machine.")(
        options.gateway(command)
    )


def _keys_of(url: str, state_dir: Path | None) -> AbstractContextManager[Keys]:
    """A gateway that was named, or that a key was given for; else the one at home."""
    source = click.get_current_context().get_parameter_source("url")
    named = source is not click.core.ParameterSource.DEFAULT or options.given_key()
    if state_dir is None and named:
        return options.connect(url)
    from .local_keys import at_home  # noqa: PLC0415  it loads what --help needs nothing of

    return at_home(state_dir)


def _seconds(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time as 30d, 12h, 5m or 90s.")
    return float(match[1]) * _UNITS_S[match[2]]


@keys.command("create")
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, default=("invoke",), show_default=True,
    type=click.Choice(["invoke", "deploy", "admin"]), help="What it may do; admin is everything. May be repeated.",
)  # fmt: skip
@click.option(
    "--function", "functions", multiple=True, metavar="NAME",
    help="The only function it covers; others are as if they were not there. May be repeated.  [default: all]",
)  # fmt: skip
@click.option("--rate", "rate_per_s", type=float, metavar="N", help="Requests a second, over time.")
@click.option(
    "--burst", type=int, metavar="N", help="Requests at once before --rate counts.  [default: --rate]"
)
@click.option("--concurrency", type=int, metavar="N", help="Requests at the same time.")
@click.option(
    "--expires", "expires_in_s", callback=_seconds, metavar="TIME", help="When it ends: 90d, 12h, 30m."
)
@_where
@options.as_json
def create_key(
    *,
    name: str,
    scopes: tuple[str, ...],
    functions: tuple[str, ...],
    url: str,
    state_dir: Path | None,
    as_json: bool,
    **limits: float | None,
) -> None:
    """Make an API key for NAME, a word that tells people whose it is. The key is printed this once.

    From the first key on the gateway answers nothing but health to those without one.

    \b
    Examples:
      pilotflame keys create laptop --scope admin
      pilotflame keys create shop --function greeter --rate 20 --concurrency 4 --expires 90d
    """
    wanted = {"name": name, "scopes": scopes, "functions": functions or None, **limits}
    with _keys_of(url, state_dir) as home:
        made = home.create_key(wanted)
    if as_json:
        return display.print_json(made)
    display.say(f"key {made['id']} for {made['name']}: {_may(made)}; it is not shown again:")
    click.echo(made["key"])
    return None


@keys.command("list")
@_where
@options.as_json
def list_keys(*, url: str, state_dir: Path | None, as_json: bool) -> None:
    """List the API keys: whose they are and what they may do. What opens anything is not stored, so not shown.

    \b
    Example:
      pilotflame keys list
    """
    with _keys_of(url, state_dir) as home:
        found = home.keys()
    if as_json:
        return display.print_json({"keys": found})
    if not found:
        return display.say("no keys: pilotflame keys create NAME")
    columns = ("id", "for", "may", "quota", "made", "last used", "ends")
    display.print_table(columns, [_row(key) for key in found])
    return None


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
@_where
@options.as_json
def revoke_key(*, key_id: str, url: str, state_dir: Path | None, as_json: bool) -> None:
    """Take the API key with this ID away. Its next request is refused; what it has asked for is finished.

    Keys are asked for even when the last one is gone. To have an open gateway again, stop it and remove access/keys.json
    from its state folder.

    \b
    Example:
      pilotflame keys revoke 3f2a9c0b1d4e
    """
    key_id = key_id.removeprefix("pf_").partition("_")[0]  # of a whole key, what is no secret
    with _keys_of(url, state_dir) as home:
        home.revoke_key(key_id)
    if as_json:
        return display.print_json({"revoked": key_id})
    click.echo(f"{key_id} is revoked")
    return None


@secrets.command("set")
@click.argument("name")
@click.argument("key")
@click.option(
    "--from-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Where the value is."
)
@options.gateway
@options.as_json
def set_secret(*, name: str, key: str, from_file: Path | None, url: str, as_json: bool) -> None:
    """Give function NAME's workers the secret KEY, as an environment variable.

    The value comes from --from-file, from standard input, or is asked for; one line end at its end is left out. Workers
    that start from now on have it, in `setup` and in the handler, not yet in `build`; those that run keep what they have.

    \b
    Examples:
      pilotflame secrets set greeter API_TOKEN
      pass show api-token | pilotflame secrets set greeter API_TOKEN
    """
    value = _value(key, from_file)
    with options.connect(url) as client:
        told = client.set_secret(name, key, value)
    if as_json:
        return display.print_json(told)
    click.echo(f"{name} has {key}; workers that start from now on are given it")
    if not told["deployed"]:
        display.say(f"no function {name} is deployed yet: the secret waits for it")
    return None


@secrets.command("list")
@click.argument("name")
@options.gateway
@options.as_json
def list_secrets(*, name: str, url: str, as_json: bool) -> None:
    """List the names of function NAME's secrets. Their values are never told.

    \b
    Example:
      pilotflame secrets list greeter
    """
    with options.connect(url) as client:
        found = client.secrets(name)
    if as_json:
        return display.print_json({"function": name, "secrets": found})
    if not found:
        return display.say(f"{name} has no secrets")
    click.echo("\n".join(found))
    return None


@secrets.command("unset")
@click.argument("name")
@click.argument("key")
@options.gateway
@options.as_json
def unset_secret(*, name: str, key: str, url: str, as_json: bool) -> None:
    """Take the secret KEY from function NAME. Workers that run keep it until they end.

    \b
    Example:
      pilotflame secrets unset greeter API_TOKEN
    """
    with options.connect(url) as client:
        client.unset_secret(name, key)
    if as_json:
        return display.print_json({"function": name, "unset": key})
    click.echo(f"{name} no longer has {key}")
    return None


COMMANDS = (keys, secrets)


def _value(key: str, from_file: Path | None) -> str:
    if from_file is not None:
        data = from_file.read_bytes()
    elif sys.stdin.isatty():
        return str(click.prompt(f"Value of {key}", hide_input=True, err=True))
    else:
        data = sys.stdin.buffer.read()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise click.UsageError(
            f"The value of {key} is not UTF-8 text: encode it, as base64 for example."
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    rate, burst, many = key["rate_per_s"], key["burst"], key["concurrency"]
    quota = [
        *([f"{rate:g} a second"] if rate is not None else []),
        *([f"{burst} at once"] if burst is not None else []),
        *([f"{many} running"] if many is not None else []),
    ]
    times = (key[name] or "-" for name in ("created_at", "last_used_at", "expires_at"))
    return (key["id"], key["name"], _may(key), ", ".join(quota) or "none", *times)


def _may(key: dict[str, Any]) -> str:
    functions = key["functions"]
    return f"{', '.join(key['scopes'])} {'all' if functions is None else ', '.join(functions) or 'nothing'}"
