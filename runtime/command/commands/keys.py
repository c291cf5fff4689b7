"""The commands `pilotflame keys create|list|revoke`.

The commands send requests to the gateway. If it does not run, they change the files in its state folder.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import orjson

from ....errors import GatewayError, Unauthorized, UnknownKey
from ...ground.access.control_socket import find_control_socket
from ...ground.access.keyring import ACCESS, Keyring
from ...ground.access.keys import check_engine, check_first, check_issuer, parse_new_key
from ...ground.settings.gateway_settings import GatewaySettings
from ...ground.settings.state_dir import check_user, locked_state_dir
from ...ground.storing.file_documents import FileDocuments
from ...ground.storing.open_documents import open_documents
from ...ground.telemetry.log_files import AUDIT, LogFiles, LogLine
from ...node.launching.container_engine import find_engine
from ..client import display, options
from ..client.client import Client
from ..client.gateway_start import wait_for_start

SCOPES = click.Choice(["invoke", "read", "deploy", "admin"])
NETWORKS = click.Choice(["none", "bridge", "host"])
_repeatable = functools.partial(click.option, multiple=True)
_WHOLE_KEY = re.compile(r"pf_([0-9a-f]+)_")
CLOSES = (
    "this is the gateway's first key. From now on all requests need one, those of programs and commands on this"
    " machine as well (PILOTFLAME_API_KEY); only /healthz and /readyz stay open, and `pilotflame keys`. Revoking the"
    " key does not open the gateway again"
)


@contextmanager
def _open_keys(url: str, api_key: str, state_dir: Path | None) -> Iterator[Client | Keyring]:
    """Yield access to a gateway's API keys: a client of the gateway, or the keyring in its files.

    If the user gave a URL or an API key, and no state folder, yield a client of the gateway at `url`. Otherwise use the
    gateway of the state folder: yield a client of its control socket if it runs, or else its keyring.
    """
    source = click.get_current_context().get_parameter_source("url")
    kinds = click.core.ParameterSource
    named = source is kinds.COMMANDLINE or (
        source is kinds.ENVIRONMENT and not os.environ.get(options.STATE_VARIABLE)
    )
    if state_dir is None and (api_key or named):
        with Client(url, api_key=api_key) as client:
            try:
                yield client
            except Unauthorized as error:
                if api_key:
                    raise
                error.remedy = (
                    "With no key at hand, run this on the gateway's machine with --state-dir FOLDER."
                )
                raise
        return
    settings = options.gateway_settings(state_dir=state_dir)
    wait_for_start(settings.port)
    if (control := find_control_socket(settings.state_dir)) is not None:
        with Client(control=control) as client:
            yield client
    else:
        check_user(settings.state_dir)
        if state_dir is not None and not state_dir.exists():
            if click.get_current_context().info_name != "create":
                raise GatewayError(
                    f"{state_dir} does not exist.", remedy="Name the state folder of a gateway."
                )
            display.say(f"made the state folder {state_dir}: no gateway has used it yet")
        with locked_state_dir(settings.state_dir) as state:
            FileDocuments(state).remove_leftovers(ACCESS)
            documents = open_documents(state, settings.database)
            keyring = Keyring(documents)
            keyring.load()
            before = {key.id for key in keyring.all()}
            # Audit the changes even if the command fails after it has made them, for example because its output is closed.
            try:
                yield keyring
            finally:
                documents.close()
                _audit(settings, before, {key.id for key in keyring.all()})


def _audit(settings: GatewaySettings, before: Set[str], after: Set[str]) -> None:
    """Write to the gateway's audit log which keys this command has made and revoked in the gateway's files."""
    changed = [("Create", key) for key in after - before] + [("Revoke", key) for key in before - after]
    if not changed:
        return
    files = LogFiles(settings.state_dir / "logs", keep_s=settings.log_keep_s)
    files.start()
    for verb, key in changed:
        text = f'by="the command line" user="{os.getuid()}" did="{verb} an API key" id="{key}"'
        files.write(AUDIT, LogLine(time.time(), "audit", text))
    files.close()


def _with_keys(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --state-dir, --url, --api-key and --json. Pass `as_json`, and as `store` what `_open_keys` yields."""

    @functools.wraps(command)
    def opening(*, url: str, api_key: str, state_dir: Path | None, **values: Any) -> Any:
        with _open_keys(url, api_key, state_dir) as store:
            return command(store=store, **values)

    return options.state_dir(options.gateway_address(options.as_json(opening)))


def _seconds(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    if found := options.seconds_of(text):
        return found
    raise click.BadParameter(f"{text!r} is not a duration such as 30d, 12h, 5m or 90s.")


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    Without --url and --api-key, these commands use the gateway of this machine's state folder, even if it does not run,
    and need no key. So they can make the first key.

    Example: pilotflame keys create laptop --scope admin
    """


@keys.command("create")
@click.argument("name")
@_repeatable("--scope", "scopes", default=("invoke",), type=SCOPES, help="Scope of the key; repeatable.")
@_repeatable(
    "--function", "functions", metavar="NAME", help="A function it may use; repeatable.  [default: all]"
)
@click.option("--rate", "rate_per_s", type=float, metavar="N", help="Requests a second, on average.")
@click.option("--burst", type=int, metavar="N", help="Requests in quick succession.  [default: --rate]")
@click.option("--concurrency", type=int, metavar="N", help="Requests that may run at the same time.")
@click.option(
    "--tokens", "model_tokens_per_min", type=int, metavar="N", help="Tokens of language models a minute."
)
@click.option(
    "--max-workers", type=int, metavar="N", help="Workers of all functions that are deployed with it."
)
@click.option(
    "--trusted",
    is_flag=True,
    help="Code that is deployed with it may run as processes, with all rights of the gateway.",
)
@_repeatable(
    "--network",
    "networks",
    type=NETWORKS,
    help="A network that its containers may use; repeatable.  [default: none]",
)
@_repeatable(
    "--image",
    "images",
    metavar="PATTERN",
    help="Images that its containers may use; repeatable.  [default: *]",
)
@_repeatable(
    "--snapshot",
    "snapshots",
    metavar="PATTERN",
    help="Snapshots outside the code that may be used, as s3://models/*; repeatable.  [default: none]",
)
@_repeatable(
    "--queue",
    "queues",
    metavar="PATTERN",
    help="Queues, places for results and profiles of the gateway that may be used; repeatable.  [default: none]",
)
@click.option("--gpus", type=int, metavar="N", help="GPUs of each of its workers at most.  [default: all]")
@click.option(
    "--memory-mb",
    type=int,
    metavar="N",
    help="MiB of memory of each of its functions at most.  [default: all]",
)
@click.option(
    "--cpus", type=float, metavar="N", help="Processors of each of its functions at most.  [default: all]"
)
@click.option("--aws", is_flag=True, help="Clients of AWS may sign requests to Lambda's routes with it.")
@click.option(
    "--issuer",
    metavar="URL",
    help="Tokens of this OpenID Connect issuer act as the key, which has no secret of its own.",
)
@click.option(
    "--audience", metavar="NAME", help="With --issuer: the audience (aud) that the tokens must have."
)
@click.option(
    "--subject",
    metavar="PATTERN",
    help="With --issuer: the subjects (sub) whose tokens fit; * stands for any characters.",
)
@click.option(
    "--owner-claim",
    metavar="CLAIM",
    help="With --issuer: callers with different values of this claim do not see each other's jobs.",
)
@click.option("--expires", "expires_in_s", callback=_seconds, metavar="TIME", help="Lifetime: 90d, 12h, 30m.")
@_with_keys
def create_key(
    *, functions: tuple[str, ...], trusted: bool, networks: tuple[str, ...], images: tuple[str, ...],
    snapshots: tuple[str, ...], queues: tuple[str, ...], gpus: int | None, memory_mb: int | None, cpus: float | None,
    issuer: str | None, audience: str | None, subject: str | None, owner_claim: str | None,
    store: Client | Keyring, as_json: bool, **fields: Any,
) -> None:  # fmt: skip
    """Make an API key. NAME says who or what uses the key. The key is printed only once.

    As soon as the first key exists, the gateway answers only health checks without a key.

    With the scope deploy, only code in containers can be deployed, which has no network, no snapshots outside its
    code, and no queues, unless the options below allow them. --trusted allows everything that is not given.

    \b
    Examples:
      pilotflame keys create laptop --scope admin
      pilotflame keys create team-a --scope deploy --max-workers 8 --snapshot 's3://models/*'
      pilotflame keys create ci --scope deploy --trusted
      pilotflame keys create github --scope deploy --trusted --issuer https://token.actions.githubusercontent.com \\
          --audience pilotflame --subject 'repo:me/app:*'
      pilotflame keys create shop --function greeter --rate 20 --concurrency 4 --expires 90d
    """
    wanted = {"functions": functions or None, **fields}
    given = {
        "networks": networks,
        "images": images,
        "snapshots": snapshots,
        "queues": queues,
        "gpus": gpus,
        "memory_mb": memory_mb,
        "cpus": cpus,
    }
    given = {name: value for name, value in given.items() if value not in ((), None)}
    if trusted or given:
        wanted["policy"] = ({"kind": "trusted"} if trusted else {}) | given
    wanted |= _issuer(issuer, audience=audience, subject=subject, owner_claim=owner_claim)
    if first := not _shown_keys(store):
        check_first(fields["scopes"])
    if isinstance(store, Client):
        key = store.post("v1", "keys", body=wanted)
    else:
        new = parse_new_key(orjson.dumps(wanted))
        check_engine(new, options.gateway_settings().engine or find_engine())
        check_issuer(new)
        made, token = store.create(new, time.time())
        key = {**made.shown(), "key": token}
    if first:
        display.warn([CLOSES])
    summary = f"key {key['id']} for {key['name']}: {_rights(key)}"
    if key["issuer"] is not None:
        text = f"{summary}; tokens of {key['issuer']['url']} act as it"
        display.print_result(key, text, as_json=as_json)
        return
    if not as_json:
        display.say(f"{summary}; it is not shown again:")
    display.print_result(key, key["key"], as_json=as_json)


def _issuer(url: str | None, **more: str | None) -> dict[str, Any]:
    """Return the field `issuer` of a new key, made from the options. Without --issuer, return no field."""
    given = {name: value for name, value in more.items() if value is not None}
    if url is None and given:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} needs --issuer.")
    # A public issuer gives tokens with any audience to all its users. So there is no default for the subject.
    if url is not None and not {"audience", "subject"} <= given.keys():
        raise click.UsageError("--issuer needs --audience and --subject.")
    return {} if url is None else {"issuer": {"url": url, **given}}


@keys.command("list")
@_with_keys
def list_keys(*, store: Client | Keyring, as_json: bool) -> None:
    """List the API keys, with their names and rights. The gateway does not store the secret parts of keys.

    Example: pilotflame keys list
    """
    found = _shown_keys(store)
    columns = ("id", "for", "may", "quota", "made", "last used", "ends")
    empty = "no keys: pilotflame keys create NAME"
    display.print_list({"keys": found}, columns, map(_row, found), empty=empty, as_json=as_json)


@keys.command("revoke")
@click.argument("id_or_name", metavar="ID|NAME")
@_with_keys
def revoke_key(*, id_or_name: str, store: Client | Keyring, as_json: bool) -> None:
    """Revoke the API key with this ID, or with this NAME if only one key has it.

    The next request with the key is refused. Requests that already run are finished.

    The gateway asks for a key even when the last key is revoked. To open the gateway again, stop it and remove the files
    access/keys.json and access/closed from its state folder. With `pilotflame serve --auth always` it then stays closed
    until it has a key.

    \b
    Examples:
      pilotflame keys revoke 3f2a9c0b1d4e
      pilotflame keys revoke laptop
    """
    key_id = _id_of(id_or_name, _shown_keys(store))
    if isinstance(store, Client):
        store.delete("v1", "keys", key_id)
    else:
        store.revoke(key_id)
    display.print_result({"revoked": key_id}, f"{key_id} is revoked", as_json=as_json)


def _shown_keys(store: Client | Keyring) -> list[dict[str, Any]]:
    """Return all keys, without their secret parts."""
    if isinstance(store, Client):
        found: list[dict[str, Any]] = store.get("v1", "keys")["keys"]
        return found
    return [key.shown() for key in store.all()]


def _id_of(text: str, keys: list[dict[str, Any]]) -> str:
    """Return the id of the key that `text` names. Raise UnknownKey if no key or more than one key fits."""
    # If the user gave a whole key, use only its id: the rest is secret and must not be printed.
    key_id = match[1] if (match := _WHOLE_KEY.match(text)) else text
    ids = [key["id"] for key in keys if key_id in (key["id"], key["name"])]
    # A key whose id is `text` takes precedence over keys whose name is `text`.
    if key_id in ids or len(ids) == 1:
        return key_id if key_id in ids else ids[0]
    if ids:
        raise UnknownKey(
            f"{len(ids)} keys have the name {key_id!r}.", remedy=f"Give an id: {', '.join(ids)}."
        )
    message = f"No API key has the id or name {key_id[:64]!r}."
    raise UnknownKey(message, remedy="See `pilotflame keys list`.")


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    units = {
        "rate_per_s": "a second",
        "burst": "in succession",
        "concurrency": "running",
        "model_tokens_per_min": "tokens a minute",
        "max_workers": "workers",
    }
    quota = ", ".join(f"{key[name]:.7g} {unit}" for name, unit in units.items() if key.get(name) is not None)
    times = (key[name] or "-" for name in ("created_at", "last_used_at", "expires_at"))
    return (key["id"], key["name"], _rights(key), quota or "none", *times)


def _rights(key: dict[str, Any]) -> str:
    functions, policy = key["functions"], key.get("policy")
    scopes = [
        f"{scope} (containers)" if scope == "deploy" and policy and policy["kind"] == "container" else scope
        for scope in key["scopes"]
    ]
    return f"{', '.join(scopes)} {'all' if functions is None else ', '.join(functions) or 'nothing'}"
