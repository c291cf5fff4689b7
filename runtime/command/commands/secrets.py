"""The commands about a function's secrets: `pilotflame secrets set|list|unset`."""

from __future__ import annotations

import sys
from typing import BinaryIO

import click

from ..client import display, options
from ..client.client import Client


@click.group()
def secrets() -> None:
    """Give a function secrets: environment variables whose values no command shows.

    Example: pilotflame secrets set greeter API_TOKEN --from-file token.txt
    """


@secrets.command("set")
@options.function
@click.argument("key")
@click.option("--from-file", type=click.File("rb"), help="A file that holds the value.")
@options.gateway
def set_secret(*, name: str, key: str, from_file: BinaryIO | None, client: Client, as_json: bool) -> None:
    """Give function NAME the secret KEY, as an environment variable that all of its code can read.

    The value comes from --from-file, standard input or a prompt. One newline at its end is removed. New processes with
    the secret replace the function's running processes, which finish their calls.

    \b
    Examples:
      pilotflame secrets set greeter API_TOKEN
      pass show api-token | pilotflame secrets set greeter API_TOKEN
    """
    result = client.put("v1", "functions", name, "secrets", key, body={"value": _value(key, from_file)})
    outcome = f"{name} has {key}" + ("; its processes are replaced" if result["deployed"] else "")
    display.print_result(result, outcome, as_json=as_json)
    if not (as_json or result["deployed"]):
        display.say(f"no function {name} is deployed yet; it will get the secret when it is deployed")


@secrets.command("list")
@options.function
@options.gateway
def list_secrets(*, name: str, client: Client, as_json: bool) -> None:
    """List the names of function NAME's secrets. No command shows their values.

    Example: pilotflame secrets list greeter
    """
    found = client.get("v1", "functions", name, "secrets")["secrets"]
    if not (as_json or found):
        return display.say(f"{name} has no secrets")
    return display.print_result({"function": name, "secrets": found}, "\n".join(found), as_json=as_json)


@secrets.command("unset")
@options.function
@click.argument("key")
@options.gateway
def unset_secret(*, name: str, key: str, client: Client, as_json: bool) -> None:
    """Remove the secret KEY from function NAME, and replace its processes.

    Example: pilotflame secrets unset greeter API_TOKEN
    """
    client.delete("v1", "functions", name, "secrets", key)
    display.print_result({"function": name, "unset": key}, f"{name} no longer has {key}", as_json=as_json)


def _value(key: str, from_file: BinaryIO | None) -> str:
    if from_file is None and sys.stdin.isatty():
        return str(click.prompt(f"Value of {key}", hide_input=True, err=True))
    try:
        text = (from_file or sys.stdin.buffer).read().decode()
    except UnicodeDecodeError:
        raise click.UsageError(f"The value of {key} is not UTF-8: encode it as base64.") from None
    if value := text.removesuffix("\n").removesuffix("\r"):
        return value
    place = from_file.name if from_file is not None else "standard input"
    raise click.UsageError(
        f"There is no value for {key}: {place} is empty. Pipe the value in, or use --from-file; to remove a secret:"
        " pilotflame secrets unset."
    )
