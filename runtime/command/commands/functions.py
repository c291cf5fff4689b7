"""The commands about functions: `pilotflame deploy|invoke|list|status|delete|warmup|prefetch`."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import click

from ....errors import GatewayUnreachable, PilotflameError
from ..client import display, exit_codes, options
from ..client.client import Client
from ..client.folder_deploy import FolderDeploy, deploy_changes
from ..client.options import FunctionSource

# If an example input is longer, the printed command has @FILE instead.
MAX_EXAMPLE_CHARS = 200
DEFAULT = "default"
"""The origin that `status` shows for a setting that nothing has set."""


@click.command()
@options.function_source
@options.model
@click.option("--install", is_flag=True, help="Install requirements.txt into a shared environment.")
@click.option("--no-check", is_flag=True, help="Start no worker now: errors in setup appear later.")
@click.option("--upload", is_flag=True, help="Send the folder's files even to a gateway on this machine.")
@click.option("--watch", "watching", is_flag=True, help="Deploy again after each change, until Ctrl-C.")
@options.gateway
def deploy(
    *, source: FunctionSource, install: bool, no_check: bool, upload: bool, watching: bool, client: Client,
    as_json: bool,
) -> None:  # fmt: skip
    """Deploy FOLDER as a function, or as a new revision of it.

    The gateway imports and builds the handler before the new revision takes calls. If this fails, the old revision
    stays. A gateway that sees the folder reads it. Any other gateway is sent the files, and later only changed files.

    Without workers, it keeps a zygote and a standby, so that calls start in milliseconds: about 10 MiB for one line of
    code, and more with imports (`pilotflame list`). The gateway's rest_mb limits the zygotes of all functions together. --set scale.rest=local keeps none.

    With --model, the template for the model's task is copied into a new folder, and this folder is deployed.

    \b
    Examples:
      pilotflame deploy hello --set scale.max=8 --name greeter
      pilotflame deploy --model hf://sentence-transformers/all-MiniLM-L6-v2
    """
    folder = source.folder
    if not as_json:
        display.warn(options.withheld(folder))
    sent = FolderDeploy(client, source, upload=upload, install=install, check=not no_check)

    def once() -> None:
        with display.deploying(str(folder), client.url, quiet=as_json) as on_progress:
            found = sent.run(on_progress)
        _print_deployed(found, folder, as_json=as_json)

    return deploy_changes(sent, folder, once, as_json=as_json) if watching else once()


def _print_deployed(found: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        return display.print_json(found)
    display.warn(found["warnings"])
    display.tell_dialect(found)
    name = found["name"]
    body = _example(folder, found["input_example"])
    return display.echo(f"{name} {found['revision']} is deployed; call it: pilotflame invoke {name} {body}")


def _example(folder: Path, example: Any) -> str:
    """Return an input for a first call, quoted for a shell: from INPUT_FILE, or else the gateway's example."""
    file = folder / options.INPUT_FILE
    with contextlib.suppress(OSError, ValueError):
        example = json.loads(file.read_bytes())
    text = json.dumps(example, ensure_ascii=False)
    return shlex.quote(text if len(text) <= MAX_EXAMPLE_CHARS else f"@{file}")


@click.command()
@options.function
@click.argument("event", required=False)
@click.option("--timing", is_flag=True, help="Show on stderr how long each phase took.")
@click.option("--content-type", default="application/json", help="The input's media type.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="How long the call may take.")
@options.gateway
def invoke(
    *, name: str, event: str | None, timing: bool, content_type: str, timeout_s: float | None, client: Client,
    as_json: bool,
) -> None:  # fmt: skip
    """Call a function and print its answer. A stream is printed as it arrives, one JSON value a line.

    EVENT is JSON, @FILE, or - for standard input. Without EVENT, the function gets null.
    With --json, the answer is printed inside an object that also holds its timing.

    \b
    Examples:
      pilotflame invoke hello '{"name": "Ada"}' --timing
      pilotflame invoke hello @test_input.json
      cat photo.jpg | pilotflame invoke classify - --content-type image/jpeg
    """
    body = options.event_body(event)
    with client.call(name, body, content_type=content_type, timeout_s=timeout_s) as reply:
        if as_json:
            facts = display.reply_facts(reply.value(), reply)
            display.print_json(facts | {"request_id": reply.request_id})
        elif reply.streaming:
            for piece in reply.pieces():
                display.print_json(piece)
        else:
            display.print_answer(reply.value())
        if timing:
            display.print_timing(reply)


@click.command("list")
@options.gateway
def list_functions(*, client: Client, as_json: bool) -> None:
    """List the functions, with their workers, requests and memory.

    Memory is the memory of all processes of a function. A page that several processes map counts once. Functions share
    the bases, which are the processes with the heavy imports. Activations are starts of workers outside of deploys. The
    last cold start is the time that a call waited for a worker, without the time of the call itself. `invoke --timing`
    shows both times.

    Example: pilotflame list
    """
    found = client.get("v1", "functions", memory=1)
    functions = found["functions"]
    loads = ("workers", "at rest", "memory", "queued", "running", "activations", "last cold start")
    columns, empty = ("function", "revision", *loads), "no functions yet: pilotflame deploy FOLDER"
    rows = [*map(_row, functions), *(_memory_rows(found) if functions else ())]
    display.print_list(found, columns, rows, empty=empty, as_json=as_json)


@click.command()
@options.function
@click.option("--memory", is_flag=True, help="Also measure the memory of each of its processes.")
@click.option("--all", "every", is_flag=True, help="Also show the settings that have their defaults.")
@options.gateway
def status(*, name: str, memory: bool, every: bool, client: Client, as_json: bool) -> None:
    """Show one function: revision, workers, settings, event sources, processes.

    Example: pilotflame status hello --memory
    """
    found = client.get("v1", "functions", name, memory=int(memory))
    if as_json:
        return display.print_json(found)
    display.print_table(("", ""), _facts(found))
    rows = _settings(found)
    shown = [row for row in rows if every or row[-1] != DEFAULT]
    display.print_table(("setting", "value", "from"), shown, apart=True)
    if len(shown) < len(rows):
        display.echo(f"{display.counted(len(rows) - len(shown), 'other setting')} by default: --all")
    if memory:
        columns = ("process", "pid", "own memory", "with its share", "resident")
        display.print_table(columns, [_process_row(process) for process in found["processes"]], apart=True)
    if sources := found.get("sources"):
        names = ("source", "state", "in flight", "completed", "left", "waiting", "lag", "last error")
        display.print_table(names, [_source_row(source) for source in sources], apart=True)
    if schedules := found.get("schedules"):
        head = ("schedule", "workers", "for", "next")
        display.print_table(head, [_schedule_row(one) for one in schedules], apart=True)
    if errors := found.get("last_errors"):
        display.echo("\nlast errors:")
        for error in errors:
            display.echo(f"{display.local_time(error['at'])} {error['source']} {error['text']}".rstrip())
    return display.warn(found["warnings"])


@click.command()
@options.function
@options.yes
@options.gateway
def delete(*, name: str, yes: bool, client: Client, as_json: bool) -> None:
    """Delete a function and all its revisions. Calls that are already running may finish.

    Example: pilotflame delete hello --yes
    """
    if not yes:
        options.check_terminal()
        # If the function does not exist, this raises the error before the question.
        known = client.get("v1", "functions", name)["name"]
        click.confirm(f"Delete {known} and all its revisions?", abort=True, err=True)
    client.delete("v1", "functions", name)
    display.print_result({"deleted": name}, f"{name} is deleted", as_json=as_json)


@click.command()
@options.function
@click.option("--workers", type=click.IntRange(min=1), default=1, help="How many workers to have.")
@click.option(
    "--for",
    "kept",
    metavar="DURATION",
    default="60s",
    help="How long to keep them without calls, as 10m or 2h.",
)
@click.option("--wait", is_flag=True, help="Return when they are ready; fail if one cannot be started.")
@click.option(
    "--timeout", "timeout_s", type=click.IntRange(1, 300), default=300, help="With --wait: seconds to wait at most."
)  # fmt: skip
@click.option("--cause", metavar="TEXT", help="What asks for them, for the function's decisions.")
@options.gateway
def warmup(
    *, name: str, workers: int, kept: str, wait: bool, timeout_s: int, cause: str | None, client: Client,
    as_json: bool,
) -> None:  # fmt: skip
    """Start workers now, ahead of the requests that will need them.

    \b
    Examples:
      pilotflame warmup hello --workers 2
      pilotflame warmup hello --wait --for 30m && ./send-requests
    """
    if (for_s := options.seconds_of(kept)) is None:
        raise click.BadParameter(f"{kept!r} is no duration, as 90s, 10m or 2h.", param_hint="--for")
    query = {"workers": workers, "for_s": int(for_s)} | ({"cause": cause} if cause else {})
    with display.spinner(f"starting {name}"):
        found = client.warm(name, wait_s=timeout_s if wait else 0, **query)
    text = f"{name}: {found['ready']} ready, {found['starting']} starting"
    display.print_result({"workers": found}, text, as_json=as_json)


@click.command()
@click.argument("names", nargs=-1, metavar="[FUNCTION]...", shell_complete=options.complete_functions)
@click.option("--all", "every", is_flag=True, help="Prefetch all functions.")
@options.gateway
def prefetch(*, names: tuple[str, ...], every: bool, client: Client, as_json: bool) -> None:
    """Bring images and weights to the gateway's machine, ahead of cold starts.

    Images and weights that the machine already has are not fetched again. The weights also go to the disk of the node's
    cache, which may evict them when it needs room. If one function fails, the others are still prefetched.

    \b
    Examples:
      pilotflame prefetch embedder classifier
      pilotflame prefetch --all
    """
    if bool(names) == every:
        raise click.UsageError("Name one or more functions, or give --all.")
    listed = [one["name"] for one in client.get("v1", "functions")["functions"]] if every else names
    wanted = list(dict.fromkeys(listed))
    found = []
    with display.progress("prefetching", in_bytes=False) as update:
        for number, name in enumerate(wanted):
            update(number, len(wanted), name)
            found.append(_prefetched(client, name))
    failed = any("error" in one for one in found)
    if as_json:
        display.print_json({"functions": found})
    else:
        columns = ("function", "image", "fetched", "snapshot", "error")
        display.print_table(columns, [_prefetched_row(one) for one in found])
    if failed:
        raise click.exceptions.Exit(exit_codes.ERROR)


def _prefetched(client: Client, name: str) -> dict[str, Any]:
    """Return facts about the image and the weights of a function, or the function's error. Raise GatewayUnreachable if no gateway answers."""
    try:
        return client.prefetch(name)
    except GatewayUnreachable:
        raise
    except PilotflameError as error:
        return {"function": name, "error": error.to_wire()}


def _prefetched_row(found: dict[str, Any]) -> tuple[str, ...]:
    if error := found.get("error"):
        return (found["function"], "-", "-", "-", str(PilotflameError.from_wire(error)))
    snapshots = display.snapshots(found)
    fetched = display.size(found["fetched_bytes"]) if snapshots else "-"
    return (found["function"], found["image"] or "-", fetched, snapshots or "-", "")


def _row(status: dict[str, Any]) -> tuple[str, ...]:
    counts = (str(status[key]) for key in ("queued", "in_flight", "activations"))
    last_ms = display.milliseconds(status["last_cold_start_ms"])
    held = " + ".join(_rest_processes(status)) or "files only"
    memory = _size(status["memory_bytes"])
    return (status["name"], status["revision"], _workers(status), held, memory, *counts, last_ms)


def _memory_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows below the functions: the memory that belongs to no single function, and the sum."""
    listed = [one["memory_bytes"] for one in found["functions"] if one["memory_bytes"] is not None]
    if (memory := found.get("memory")) is None:
        # With an API key for only some functions, show the sum of these functions' memory, if it was measured.
        held = {"all": sum(listed) if listed else None}
    else:
        held = {"(bases)": memory["bases_bytes"], "(gateway)": memory["gateway_bytes"]}
        if (others := memory["functions_bytes"] - sum(listed)) > 0:
            held["(deploying or deleted)"] = others
        held["all"] = memory["total_bytes"]
    return [(name, "", "", "", _size(count), "", "", "", "") for name, count in held.items()]


def _size(count: int | None) -> str:
    return "-" if count is None else display.size(count)


def _workers(status: dict[str, Any]) -> str:
    workers = status["workers"]
    others = [
        f"{workers[state]} {state}" for state in ("parked", "starting", "draining") if workers.get(state)
    ]
    if failing := status.get("failing"):
        others.append(f"{display.counted(failing['failures'], 'start')} failed")
    stopped = {"": [], "budget": ["budget used up"]}.get(status["stopped"], [status["stopped"]])
    return ", ".join([f"{workers['ready']} of {status['settings']['scale']['max']}", *others, *stopped])


def _at_rest(status: dict[str, Any]) -> str:
    held, held_mb = " + ".join(_rest_processes(status)), status.get("rest_mb")
    return f"{held}, {held_mb:.0f} MiB" if held and held_mb else held or "files only"


def _rest_processes(status: dict[str, Any]) -> list[str]:
    return [name for name in ("zygote", "standby") if status[name]]


def _facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    batch = f", batches of up to {status['batch']}" if status["batch"] else ""
    dialect = status.get("dialect", display.OWN)
    handler = f"{status['entry']} ({dialect})" if dialect != display.OWN else status["settings"]["handler"]
    last_ms = display.milliseconds(status["last_cold_start_ms"])
    return [
        ("function", status["name"]),
        ("revision", f"{status['revision']}, deployed {status['created_at']}"),
        ("handler", f"{handler}, {status['kind'].replace('_', ' ')}{batch}"),
        ("snapshot", display.snapshots(status) or "none"),
        ("workers", _workers(status)),
        *([("starts fail", _failing(failing))] if (failing := status.get("failing")) else []),
        *(
            [("cold because", f"it {why}, at {display.local_time(status['cold_since'])[:19]}")]
            if (why := status.get("cold_because")) and not status.get("failing")
            else []
        ),
        ("at rest", _at_rest(status)),
        ("requests", f"{status['queued']} queued, {status['in_flight']} running"),
        *([("budget", _budget(budget))] if (budget := status.get("budget")) else []),
        ("activations", f"{status['activations']}, the last cold start {last_ms}"),
    ]


def _failing(failing: dict[str, Any]) -> str:
    at = failing["next_at"]
    again = f"not before {display.local_time(at)[:19]}" if at else "by the next call"
    return f"{failing['error'].rstrip('.')}. The next start: {again}"


def _budget(budget: dict[str, Any]) -> str:
    used = (
        ("money", budget["money"], budget["money_per_day"]),
        ("seconds of workers", budget["worker_s"], budget["seconds_per_day"]),
    )
    return "used today: " + ", ".join(
        f"{amount:.4g} of {most:g} {of}" for of, amount, most in used if most is not None
    )


def _settings(status: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return each effective setting, its value and its origin. The values of environment variables are not shown."""
    origins, rows = status["setting_origins"], list[tuple[str, str]]()
    for key, value in status["settings"].items():
        if key == "env":
            rows += [(f"env.{name}", "(set)") for name in value]
        elif key == "prefixes":
            rows += [(f"prefixes.{name}", ", ".join(fields)) for name, fields in value.items()]
        elif isinstance(value, dict):
            rows += [(f"{key}.{name}", _shown(inner)) for name, inner in value.items()]
        else:
            rows.append((key, _shown(value)))
    return [(key, value, _origin(origins, key)) for key, value in rows]


def _origin(origins: dict[str, str], key: str) -> str:
    """Return where a setting was set. If it was not set itself, return where a key below it was set, or else its table."""
    below = (origin for name, origin in origins.items() if name.startswith(f"{key}."))
    return origins.get(key) or next(below, None) or origins.get(key.partition(".")[0]) or DEFAULT


def _shown(value: Any) -> str:
    if isinstance(value, list) and value:
        tables = any(isinstance(one, dict) for one in value)
        return display.counted(len(value), "table") if tables else ", ".join(map(str, value))
    return "-" if value is None or value == [] else value if isinstance(value, str) else json.dumps(value)


def _source_row(source: dict[str, Any]) -> tuple[str, ...]:
    counts = (str(source[key]) for key in ("in_flight", "completed", "left"))
    backlog = "-" if source["backlog"] is None else str(source["backlog"])
    lag = "-" if source["lag_s"] is None else display.duration(source["lag_s"])
    failed_at = source["last_error_at"]
    error = f"{display.local_time(failed_at)} {source['last_error']}" if failed_at else "-"
    return (source["queue"].rpartition("/")[2], source["state"], *counts, backlog, lag, error)


def _schedule_row(schedule: dict[str, Any]) -> tuple[str, ...]:
    following = display.local_time(schedule["next_at"]) if schedule["next_at"] else "never"
    held = display.duration(schedule["for_s"])
    return (f"{schedule['cron']} {schedule['timezone']}", str(schedule["workers"]), held, following)


def _process_row(process: dict[str, Any]) -> tuple[str, ...]:
    memory = (f"{process[key]:.1f} MiB" for key in ("uss_mb", "pss_mb", "rss_mb"))
    return (process["name"], str(process["pid"]), *memory)
