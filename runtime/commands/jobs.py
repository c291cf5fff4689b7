"""The commands of jobs: `pilotflame run`, `pilotflame jobs list|get|cancel|retry|purge|follow`."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ...errors import BadInput, JobConflict, JobError, PilotflameError
from ..jobs.job import JobState
from . import display, options

EXIT_ERROR = 1
EXIT_NOT_COMPLETED = 4
"""The job has ended, and not well."""

_JOB_IDS = click.argument("job_ids", metavar="ID...", nargs=-1, required=True)


@click.command("run")
@click.argument("name")
@click.argument("event", required=False)
@click.option("--wait", is_flag=True, help="Wait until it has ended, and print its output.")
@click.option(
    "--idempotency-key", "key", default="", metavar="KEY", help="The same key again gives the same job."
)
@click.option("--webhook", metavar="URL", help="Who is to be told when it has ended.")
@click.option("--low-priority", is_flag=True, help="After the jobs that have no such mark.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.001),
    metavar="SECONDS",
    help="How long it may run.  [default: the function's timeout_s]",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(min=0.001),
    metavar="SECONDS",
    help="How long it may wait in the queue.  [default: the function's ttl_s]",
)
@options.gateway
@options.as_json
def run_job(
    *, name: str, event: str | None, wait: bool, key: str, webhook: str | None, low_priority: bool,
    timeout_s: float | None, ttl_s: float | None, url: str, as_json: bool,
) -> None:  # fmt: skip
    """Submit a job and print its id: it is stored, runs when there is room, and its output is kept for a while.

    EVENT is JSON, or @FILE, or - for standard input; without it the function gets null.

    \b
    Exit codes with --wait: 0 it completed, 4 it failed, timed out or was cancelled. Ctrl-C ends the waiting,
    not the job.

    \b
    Examples:
      pilotflame run hello '{"name": "Ada"}'
      pilotflame run hello @test_input.json --wait
      pilotflame run report '{"day": 7}' --idempotency-key report-7 --webhook https://example.com/done --low-priority
    """
    order = _order(options.event_body(event), webhook, low_priority, timeout_s, ttl_s)
    with options.connect(url) as client:
        submitted = client.submit(name, order, key=key)
        if submitted["replayed"]:
            display.say("it was submitted before with this key")
        if not wait:
            return display.print_json(submitted) if as_json else click.echo(submitted["id"])
        if not as_json:
            display.say(f"job {submitted['id']}")
        with _going_on(name, submitted["id"]), display.waiting(f"waiting for {submitted['id']}"):
            job = client.wait(name, submitted["id"])
    if as_json:
        display.print_json(job)
    elif job["status"] == JobState.COMPLETED:
        display.print_answer(_output(job))
    return _leave(job)


@click.group()
def jobs() -> None:
    """Look at a function's jobs, and cancel, retry or follow them.

    \b
    Examples:
      pilotflame jobs list hello
      pilotflame jobs get hello job-…
    """


@jobs.command("list")
@click.argument("name")
@click.option(
    "--status", "states", multiple=True, type=click.Choice(list(JobState), case_sensitive=False),
    help="Only those; may be repeated.  [default: all]",
)  # fmt: skip
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@options.gateway
@options.as_json
def list_jobs(*, name: str, states: tuple[str, ...], limit: int, url: str, as_json: bool) -> None:
    """List a function's jobs, the newest first.

    Delay is how long a job waited until a worker had it, execution how long it has run.

    \b
    Examples:
      pilotflame jobs list hello
      pilotflame jobs list hello --status failed --status timed_out --limit 100
    """
    with options.connect(url) as client:
        found = client.jobs(name, [str(state) for state in states], limit)
    if as_json:
        return display.print_json({"jobs": found})
    if not found:
        return display.say(f"no such jobs: pilotflame run {name} EVENT")
    columns = ("id", "status", "age", "attempts", "delay", "execution")
    display.print_table(columns, [_row(job) for job in found])
    return None


@jobs.command("get")
@click.argument("name")
@click.argument("job_id", metavar="ID")
@click.option(
    "--output-only", is_flag=True, help="Print the output and nothing else; exit code 4 if it failed."
)
@options.gateway
@options.as_json
def get_job(*, name: str, job_id: str, output_only: bool, url: str, as_json: bool) -> None:
    """Show all of one job.

    Where it stands, its output or error, and of one that failed the last log lines.

    Exit code 0 whatever became of it; with --output-only 4 if it failed, timed out or was cancelled, and 1 if it has
    not ended.

    \b
    Examples:
      pilotflame jobs get hello job-…
      pilotflame jobs get hello job-… --output-only > answer.json
    """
    with options.connect(url) as client:
        job = client.job(name, job_id)
    if output_only:
        return _print_output(name, job)
    if as_json:
        return display.print_json(job)
    display.print_table(("", ""), _facts(job))
    if "output" in job:
        click.echo("\nhow far it is:" if job["status"] == JobState.IN_PROGRESS else "\noutput:")
        display.print_answer(_output(job))
    if trace := job.get("errorDetails", {}).get("details", {}).get("traceback"):
        click.echo(f"\n{trace.rstrip()}")
    if job.get("logs"):
        click.echo(f"\nlast log lines:\n{job['logs']}")
    return None


@jobs.command("cancel")
@click.argument("name")
@_JOB_IDS
@options.gateway
@options.as_json
def cancel_jobs(*, name: str, job_ids: tuple[str, ...], url: str, as_json: bool) -> None:
    """Cancel jobs, waiting or running. One that has ended stays as it is.

    Exit code 1 if one of them could not be cancelled; the others are all the same.

    \b
    Example:
      pilotflame jobs cancel hello job-… job-…
    """
    with options.connect(url) as client:
        _each(job_ids, lambda job_id: client.cancel(name, job_id), as_json=as_json)


@jobs.command("retry")
@click.argument("name")
@_JOB_IDS
@options.gateway
@options.as_json
def retry_jobs(*, name: str, job_ids: tuple[str, ...], url: str, as_json: bool) -> None:
    """Run jobs that failed or timed out again.

    They keep their ids. Exit code 1 if one of them could not be; the others are all the same.

    \b
    Example:
      pilotflame jobs retry hello job-… job-…
    """
    with options.connect(url) as client:
        _each(job_ids, lambda job_id: client.retry(name, job_id), as_json=as_json)


@jobs.command("purge")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@options.gateway
@options.as_json
def purge_jobs(*, name: str, yes: bool, url: str, as_json: bool) -> None:
    """Cancel all jobs that wait in a function's queue. Those that run may finish.

    \b
    Example:
      pilotflame jobs purge hello --yes
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("Nobody is there to be asked: say --yes.")
    with options.connect(url) as client:
        if not yes:
            waiting = client.health(name)["jobs"]["inQueue"]
            click.confirm(f"Cancel the {waiting} jobs that wait for {name}?", abort=True, err=True)
        removed = client.purge(name)
    if as_json:
        return display.print_json({"removed": removed})
    click.echo(f"{removed} cancelled")
    return None


@jobs.command("follow")
@click.argument("name")
@click.argument("job_id", metavar="ID")
@options.gateway
@click.option(
    "--json", "as_json", is_flag=True, help="Print each event as JSON, for programs; the last has the job."
)
def follow_job(*, name: str, job_id: str, url: str, as_json: bool) -> None:
    """Print what a job yields until it has ended.

    One JSON value a line, from the first piece on; of a function that does not stream, the output at its end.

    Exit codes: 0 it completed, 4 it failed, timed out or was cancelled. Ctrl-C ends the following, not the job.

    \b
    Example:
      pilotflame jobs follow hello job-…
    """
    told, job = False, dict[str, Any]()
    with options.connect(url) as client, _going_on(name, job_id):
        for event, data in client.follow(name, job_id):
            if as_json:
                display.print_json({"event": event, "data": data})
            elif event == "output":
                told = True
                display.print_json(data)
            elif event == "status":
                display.say(data["status"])
            job = data
    if not (as_json or told) and job["status"] == JobState.COMPLETED:
        display.print_answer(_output(job))
    _leave(job)


COMMANDS = (run_job, jobs)


def _order(
    body: bytes, webhook: str | None, low_priority: bool, timeout_s: float | None, ttl_s: float | None
) -> dict[str, Any]:
    try:
        event = json.loads(body, parse_constant=_refuse) if body.strip() else None
    except ValueError as error:
        raise BadInput(
            f"The event is not JSON: {error}.", remedy="Text takes quotes of its own: '\"text\"'."
        ) from None
    policy: dict[str, Any] = {"lowPriority": True} if low_priority else {}
    if timeout_s is not None:
        policy["executionTimeout"] = max(1, round(timeout_s * 1000))
    if ttl_s is not None:
        policy["ttl"] = max(1, round(ttl_s * 1000))
    return {"input": event, "policy": policy} | ({"webhook": webhook} if webhook else {})


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


@contextmanager
def _going_on(name: str, job_id: str) -> Iterator[None]:
    """Inside, Ctrl-C ends only the looking."""
    try:
        yield
    except KeyboardInterrupt:
        display.say(f"\nthe job goes on: pilotflame jobs follow {name} {job_id}")
        raise


def _each(job_ids: tuple[str, ...], act: Callable[[str], dict[str, Any]], *, as_json: bool) -> None:
    """Every one, whatever becomes of the others; exit code 1 if one is refused."""
    done: list[dict[str, Any]] = []
    refused: dict[str, Any] = {}
    for job_id in dict.fromkeys(job_ids):
        try:
            job = act(job_id)
        except JobError as error:
            refused[job_id] = error.to_wire()
            display.say(f"error: {error}")
            continue
        done.append(job)
        if not as_json:
            click.echo(f"{job_id} {job['status']}")
    if as_json:
        display.print_json({"jobs": done, "errors": refused})
    if refused:
        raise click.exceptions.Exit(EXIT_ERROR)


def _print_output(name: str, job: dict[str, Any]) -> None:
    state = JobState(job["status"])
    if not state.final:
        raise JobConflict(
            f"{job['id']} is {state}: it has no output yet.",
            remedy=f"Wait for it: pilotflame jobs follow {name} {job['id']}.",
        )
    if state is JobState.COMPLETED:
        display.print_answer(_output(job))
    _leave(job)


def _leave(job: dict[str, Any]) -> None:
    """What kept it from completing, and the exit code for that."""
    if job["status"] == JobState.COMPLETED:
        return
    why = PilotflameError.from_wire(job["errorDetails"]) if "errorDetails" in job else ""
    display.say(" ".join(f"error: {job['id']} is {job['status']}. {why}".split()))
    raise click.exceptions.Exit(EXIT_NOT_COMPLETED)


def _output(job: dict[str, Any]) -> Any:
    """The output as the function gave it: bytes where it gave bytes."""
    if "output_type" in job:
        return base64.b64decode(job["output"])
    return job.get("output", b"")


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    times = (_lasted(job[key]) if job["attempts"] else "-" for key in ("delayTime", "executionTime"))
    return (job["id"], job["status"], display.ago(job["createdAt"]), str(job["attempts"]), *times)


def _lasted(ms: float) -> str:
    return display.milliseconds(ms) if ms < 60_000 else display.lasting(ms / 1000)


def _facts(job: dict[str, Any]) -> list[tuple[str, str]]:
    tried = f"{job['attempts']}, worker {job['workerId'] or '-'}" if job["attempts"] else "none"
    error = job.get("errorDetails", {})
    facts = {
        "job": job["id"],
        "function": job["function"],
        "status": job["status"],
        "submitted": f"{job['createdAt']}, {display.ago(job['createdAt'])} ago",
        "delay": _lasted(job["delayTime"]),
        "execution": _lasted(job["executionTime"]) if job["executionTime"] else "",
        "attempts": f"{tried}{', retried by hand ' + str(job['retries']) if job['retries'] else ''}",
        "pieces": str(job.get("pieces", "")),
        "error": f"{error['type']}: {error['message']}" if error else "",
        "what to do": error.get("remedy", ""),
    }
    return [(name, value) for name, value in facts.items() if value]
