"""The commands about jobs: `pilotflame run`, `pilotflame jobs list|get|cancel|retry|purge|follow`."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import click

from ....errors import BadInput, JobConflict, JobError, PilotflameError
from ...jobs.stored.job import JobState
from ..client import display, exit_codes, options
from ..client.client import Client, jobs_of

# `Client.follow` yields only the pieces after a given number. No piece has a number this high, so it yields none.
AFTER_ALL_PIECES = 999_999_999
_JOB_ID = click.argument("job_id", metavar="ID")
_JOB_IDS = click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
_seconds = functools.partial(click.option, type=click.FloatRange(min=0.001), metavar="SECONDS")


@click.command("run")
@options.function
@click.argument("event", required=False)
@click.option("--wait", is_flag=True, help="Wait until the job has ended, and print its output.")
@click.option("--idempotency-key", "key", metavar="KEY", help="The same key again returns the same job.")
@click.option("--webhook", metavar="URL", help="Where the gateway sends the job when it has ended.")
@click.option("--low-priority", is_flag=True, help="Run it after the jobs without this option.")
@_seconds("--timeout", "timeout_s", help="How long it may run.  [default: the function's timeout_s]")
@_seconds("--ttl", "ttl_s", help="How long it may wait in the queue.  [default: the function's ttl_s]")
@options.gateway
def run_job(
    *, name: str, event: str | None, wait: bool, key: str | None, webhook: str | None, low_priority: bool,
    timeout_s: float | None, ttl_s: float | None, client: Client, as_json: bool,
) -> None:  # fmt: skip
    """Submit a job and print its id. The gateway stores the job, runs it later, and keeps its output for a while.

    EVENT is JSON, @FILE, or - for standard input. Without EVENT, the function gets null.

    \b
    Exit codes with --wait: 0 it completed, 4 it failed, timed out or was cancelled. Ctrl-C ends the waiting,
    not the job.

    \b
    Examples:
      pilotflame run hello '{"name": "Ada"}'
      pilotflame run hello @test_input.json --wait
      pilotflame run report '{"day": 7}' --idempotency-key report-7 --webhook https://example.com/done
    """
    request = _job_request(options.event_body(event), webhook, low_priority, timeout_s, ttl_s)
    submitted = client.submit(name, request, key=key or "")
    if submitted["replayed"]:
        display.say("a job with this key was submitted before")
    if not wait:
        return display.print_result(submitted, submitted["id"], as_json=as_json)
    if not as_json:
        display.say(f"job {submitted['id']}")
    with _goes_on(name, submitted["id"]), display.spinner(f"waiting for {submitted['id']}"):
        *_, (_event, job) = client.follow(name, submitted["id"], after=AFTER_ALL_PIECES)
    if as_json:
        display.print_json(job)
    return _print_ended(job, output=not as_json)


class _Jobs(click.Group):
    """The group `jobs`. If a user writes a function's name in place of a command, the error says how to list its jobs."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(
                f"No such command {args[0]!r}. To list its jobs: pilotflame jobs list {args[0]}", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Jobs)
def jobs() -> None:
    """List a function's jobs; get, cancel, retry or follow them.

    Example: pilotflame jobs list hello
    """


@jobs.command("list")
@options.function
@options.states("--status", JobState)
@options.limit
@options.gateway
def list_jobs(*, name: str, states: tuple[str, ...], limit: int, client: Client, as_json: bool) -> None:
    """List a function's jobs, the newest first.

    "delay" is the time that a job waited for a worker, and "execution" is the time that it has run.

    \b
    Examples:
      pilotflame jobs list hello
      pilotflame jobs list hello --status failed --status timed_out --limit 100
    """
    found = client.get(*jobs_of(name), status=states, limit=limit)["jobs"]
    columns = ("id", "status", "age", "attempts", "delay", "execution")
    empty = f"no such jobs: pilotflame run {name} EVENT"
    display.print_list({"jobs": found}, columns, map(_row, found), empty=empty, as_json=as_json)


@jobs.command("get")
@options.function
@_JOB_ID
@click.option("--output-only", is_flag=True, help="Print only the output; exit code 4 if the job failed.")
@options.gateway
def get_job(*, name: str, job_id: str, output_only: bool, client: Client, as_json: bool) -> None:
    """Show one job in full: its status, its output or error, and the last lines that it printed.

    The exit code is 0 for any status. With --output-only, the exit code is 4 if the job failed, timed out or was
    cancelled, and 1 if the job has not ended.

    \b
    Examples:
      pilotflame jobs get hello job-…
      pilotflame jobs get hello job-… --output-only > answer.json
    """
    job = client.get(*jobs_of(name), job_id)
    if output_only:
        if not (state := JobState(job["status"])).final:
            remedy = f"Wait for it: pilotflame jobs follow {name} {job_id}."
            raise JobConflict(f"{job_id} is {state}: it has no output yet.", remedy=remedy)
        return _print_ended(job)
    if as_json:
        return display.print_json(job)
    display.print_table(("", ""), _facts(job))
    if "output" in job:
        display.echo("\nprogress:" if job["status"] == JobState.IN_PROGRESS else "\noutput:")
        display.print_answer(_output(job))
    if job.get("logs"):
        display.echo(f"\nit printed:\n{job['logs']}")
    if "error" in job:
        display.say(_more(job))
    return None


@jobs.command("cancel")
@options.function
@_JOB_IDS
@options.gateway
def cancel_jobs(*, name: str, job_ids: tuple[str, ...], client: Client, as_json: bool) -> None:
    """Cancel jobs that wait or run. A job that has ended does not change.

    If a job cannot be cancelled, the other jobs are still cancelled, and the exit code is 1.

    Example: pilotflame jobs cancel hello job-… job-…
    """
    _for_each(job_ids, lambda job_id: client.post(*jobs_of(name), job_id, "cancel"), as_json=as_json)


@jobs.command("retry")
@options.function
@_JOB_IDS
@options.gateway
def retry_jobs(*, name: str, job_ids: tuple[str, ...], client: Client, as_json: bool) -> None:
    """Run jobs again that have failed or timed out, with the same ids.

    If a job cannot be retried, the other jobs are still retried, and the exit code is 1.

    Example: pilotflame jobs retry hello job-… job-…
    """
    _for_each(job_ids, lambda job_id: client.post(*jobs_of(name), job_id, "retry"), as_json=as_json)


@jobs.command("purge")
@options.function
@options.yes
@options.gateway
def purge_jobs(*, name: str, yes: bool, client: Client, as_json: bool) -> None:
    """Cancel all jobs in a function's queue. Jobs that are already running may finish.

    Example: pilotflame jobs purge hello --yes
    """
    if not yes:
        options.check_terminal()
        waiting = client.get(*jobs_of(name), limit=1)["counts"]["in_queue"]
        click.confirm(f"Cancel {display.counted(waiting, 'waiting job')} of {name}?", abort=True, err=True)
    purged = client.post(*jobs_of(name), "purge")
    display.print_result(purged, f"{purged['cancelled']} cancelled", as_json=as_json)


@jobs.command("follow")
@options.function
@_JOB_ID
@options.gateway
def follow_job(*, name: str, job_id: str, client: Client, as_json: bool) -> None:
    """Print what a job yields until it has ended.

    Each line is a JSON value, from the first piece on. If the job does not stream, the only line is its output.

    Exit codes: 0 it completed, 4 it failed, timed out or was cancelled. Ctrl-C does not end the job.

    Example: pilotflame jobs follow hello job-…
    """
    printed, job = as_json, dict[str, Any]()
    with _goes_on(name, job_id):
        for event, job in client.follow(name, job_id):
            if as_json:
                display.print_json({"event": event, "data": job})
            elif event == "output":
                printed = True
                display.print_json(job)
            elif event == "status":
                display.say(job["status"])
    _print_ended(job, output=not printed)


def _job_request(
    body: bytes, webhook: str | None, low_priority: bool, timeout_s: float | None, ttl_s: float | None
) -> dict[str, Any]:
    try:
        event = json.loads(body, parse_constant=_refuse_constant) if body.strip() else None
    except ValueError as error:
        remedy = "Text needs quotes of its own: '\"text\"'."
        raise BadInput(f"The event is not JSON: {error}.", remedy=remedy) from None
    fields = {"execution_timeout_s": timeout_s, "ttl_s": ttl_s, "webhook": webhook}
    request = {"input": event, "priority": "low" if low_priority else "normal"}
    return request | {key: value for key, value in fields.items() if value is not None}


def _goes_on(name: str, job_id: str) -> AbstractContextManager[None]:
    return exit_codes.on_interrupt(f"\nthe job goes on: pilotflame jobs follow {name} {job_id}")


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _for_each(job_ids: tuple[str, ...], act: Callable[[str], dict[str, Any]], *, as_json: bool) -> None:
    """Call `act` with every id, even if some jobs are refused. At the end, exit with code 1 if a job was refused."""
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
            display.echo(f"{job_id} {job['status']}")
    if as_json:
        display.print_json({"jobs": done, "errors": refused})
    if refused:
        raise click.exceptions.Exit(exit_codes.ERROR)


def _print_ended(job: dict[str, Any], *, output: bool = True) -> None:
    """Print a job's output if `output` is True. If the job did not complete, print its error and exit with code 4."""
    if job["status"] != JobState.COMPLETED:
        why = PilotflameError.from_wire(job["error"]) if "error" in job else ""
        after = f" after {display.counted(job['attempts'], 'attempt')}" if job["attempts"] > 1 else ""
        told = f"{why}".rstrip(".") + f"; {_more(job)}" if "error" in job else ""
        display.say(" ".join(f"error: {job['id']} is {job['status']}{after}. {told}".split()))
        raise click.exceptions.Exit(exit_codes.NOT_COMPLETED)
    if output:
        display.print_answer(_output(job))


def _more(job: dict[str, Any]) -> str:
    return f"the function's log has more: pilotflame logs {job['function']} --request {job['id']}"


def _output(job: dict[str, Any]) -> Any:
    """Return the output in the form in which the function returned it. If it is bytes, the gateway sends base64."""
    if "output_type" in job:
        return base64.b64decode(job["output"])
    return job.get("output", b"")


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    times = (_duration(job[key]) if job["attempts"] else "-" for key in ("delay_ms", "execution_ms"))
    return (job["id"], job["status"], display.age(job["created_at"]), str(job["attempts"]), *times)


def _duration(ms: float) -> str:
    return display.milliseconds(ms) if ms < 60_000 else display.duration(ms / 1000)


def _facts(job: dict[str, Any]) -> list[tuple[str, str]]:
    attempts = f"{job['attempts']}, worker {job['worker'] or '-'}" if job["attempts"] else "none"
    error = job.get("error", {})
    facts = {
        "job": job["id"],
        "function": job["function"],
        "status": job["status"],
        "submitted": f"{job['created_at']}, {display.age(job['created_at'])} ago",
        "delay": _duration(job["delay_ms"]),
        "execution": _duration(job["execution_ms"]) if job["execution_ms"] else "",
        "attempts": f"{attempts}{', retried by hand ' + str(job['retries']) if job['retries'] else ''}",
        "pieces": str(job["pieces"] or ""),
        "error": f"{error['type']}: {error['message']}" if error else "",
        "what to do": error.get("remedy", ""),
    }
    return [(name, value) for name, value in facts.items() if value]
