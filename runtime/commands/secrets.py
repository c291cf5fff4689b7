"""The commands about a function's secrets: `pilotflame secrets set|list|unset`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import display, options
from .client import Client

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def secrets() -> None:
    """Give a function secrets: environment variables of its workers that no command shows.

    \b
    Example:
      pilotflame secrets set greeter API_TOKEN --from-file token.txt
    """


@secrets.command("set")
@click.argument("name")
@click.argument("key")
@click.option("--from-file", type=_FILE, help="A file that holds the value.")
@options.gateway
def set_secret(*, name: str, key: str, from_file: Path | None, client: Client, as_json: bool) -> None:
    """Give function NAME's workers the secret KEY, as an environment variable.

    The value comes from --from-file, standard input or a prompt; one newline at its end is removed. Workers
    that start from now on have it in `setup` and in the handler, but not in `build`. Workers that run do not
    change.

    \b
    Examples:
      pilotflame secrets set greeter API_TOKEN
      pass show api-token | pilotflame secrets set greeter API_TOKEN
    """
    result = client.put("v1", "functions", name, "secrets", key, body={"value": _value(key, from_file)})
    display.print_result(result, f"{name} has {key}; workers that start from now on get it", as_json=as_json)
    if not (as_json or result["deployed"]):
        display.say(f"no function {name} is deployed yet; it gets the secret when it is")


@secrets.command("list")
@click.argument("name")
@options.gateway
def list_secrets(*, name: str, client: Client, as_json: bool) -> None:
    """List the names of function NAME's secrets. No command shows their values.

    \b
    Example:
      pilotflame secrets list greeter
    """
    found = client.get("v1", "functions", name, "secrets")["secrets"]
    if not (as_json or found):
        return display.say(f"{name} has no secrets")
    return display.print_result({"function": name, "secrets": found}, "\n".join(found), as_json=as_json)


@secrets.command("unset")
@click.argument("name")
@click.argument("key")
@options.gateway
def unset_secret(*, name: str, key: str, client: Client, as_json: bool) -> None:
    """Remove the secret KEY from function NAME. Workers that run keep it until they end.

    \b
    Example:
      pilotflame secrets unset greeter API_TOKEN
    """
    client.delete("v1", "functions", name, "secrets", key)
    display.print_result({"function": name, "unset": key}, f"{name} no longer has {key}", as_json=as_json)


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
            f"The value of {key} is not UTF-8 text. Encode it, for example as base64."
        ) from None
    return text.removesuffix("\n").removesuffix("\r")
