"""The command that sends many lines through one function: `pilotflame batch`."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import click
import uvloop

from ....errors import BatchFailed, SourceMissing
from ....snapshot.sources.s3 import S3Source
from ...command.client import display, exit_codes, options
from ...ground.settings.gateway_settings import default_state_dir
from .inputs import InputLine, Inputs
from .journal import Journal
from .submitter import Submitter, run_in_order


@click.command()
@click.argument("function", shell_complete=options.complete_functions)
@click.argument("source", metavar="INPUT")
@click.argument("output", metavar="OUTPUT")
@click.option("--max-in-flight", type=click.IntRange(1, 4096), default=64, help="Lines at the same time.")
@click.option("--restart", is_flag=True, help="Begin again, and overwrite OUTPUT.")
@options.gateway_address
@options.as_json
def batch(
    *, function: str, source: str, output: str, max_in_flight: int, restart: bool, url: str, api_key: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Run FUNCTION with every line of INPUT, and write the answers to OUTPUT, line for line.

    INPUT is a .jsonl file, a folder of them, or s3://bucket/…; OUTPUT is a .jsonl file or s3://bucket/key. A
    line that fails gets {"error": …} as its answer. Lines are jobs of the lowest priority: other calls run
    first.

    After Ctrl-C, kill -9 or a crash the same command continues where it stopped, and runs no answered line
    again.

    \b
    Exit codes: 0 all lines have answers, 1 the batch could not go on, 4 some lines failed, 130 interrupted.

    \b
    Examples:
      pilotflame batch embed texts.jsonl vectors.jsonl
      pilotflame batch embed s3://bucket/texts/ s3://bucket/vectors.jsonl --max-in-flight 256
    """
    started_s = time.monotonic()
    inputs = Inputs.open(source)
    path = _working_file(output)
    remote = output != str(path)
    # A resumed batch already has a working file. Such a batch checked the output when it began.
    if remote and not restart and not path.exists():
        _check_absent(output)
    journal = Journal(path, function=function, digest=inputs.digest, restart=restart)
    resumed_at = journal.done
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(inputs, journal, function, url=url, api_key=api_key, max_in_flight=max_in_flight))
        journal.sync()
        if remote:
            bucket, name = _source_and_name(output)
            bucket.put(name, path)
        journal.finish()
    except KeyboardInterrupt:
        display.say(
            f"interrupted after {display.counted(journal.done, 'line')}; the same command continues from there"
        )
        raise
    finally:
        journal.close()
    if remote:
        path.unlink()
    _report(journal, resumed_at, output, time.monotonic() - started_s, as_json=as_json)
    if journal.failed:
        raise click.exceptions.Exit(exit_codes.NOT_COMPLETED)


async def _run(
    inputs: Inputs, journal: Journal, function: str, *, url: str, api_key: str, max_in_flight: int
) -> None:
    started_s, before = time.monotonic(), journal.done
    with display.progress(function, in_bytes=False) as update:

        def written(line: InputLine) -> None:
            rate = (journal.done - before) / max(time.monotonic() - started_s, 0.001)
            failed = f", {journal.failed} failed" if journal.failed else ""
            update(line.end, inputs.total_bytes, f"{journal.done:,} lines, {rate:,.0f}/s{failed}")

        async with Submitter(url, function, api_key=api_key, run=journal.run) as submitter:
            lines = inputs.lines(journal.done)
            await run_in_order(lines, submitter.answer, journal, max_in_flight=max_in_flight, written=written)


def _report(journal: Journal, resumed_at: int, output: str, seconds: float, *, as_json: bool) -> None:
    rate = (journal.done - resumed_at) / max(seconds, 0.001)
    facts = {
        "output": output, "lines": journal.done, "failed": journal.failed, "resumed_at": resumed_at,
        "seconds": round(seconds, 3), "lines_per_s": round(rate, 1),
    }  # fmt: skip
    before = f", {resumed_at} of them before" if resumed_at else ""
    failed = f"; {journal.failed} failed, their lines say why" if journal.failed else ""
    text = f"{display.counted(journal.done, 'line')}{before}, {seconds:.1f} s, {rate:.0f}/s{failed}: {output}"
    display.print_result(facts, text, as_json=as_json)


def _working_file(output: str) -> Path:
    """Return the local file that answers are appended to. If `output` is on S3, the file is uploaded at the end."""
    if not output.startswith("s3://"):
        return Path(output)
    folder = default_state_dir() / "batches"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(output.encode()).hexdigest()[:32]}.jsonl"


def _check_absent(output: str) -> None:
    """Raise BatchFailed if the S3 object `output` exists, SourceMissing if its bucket does not exist."""
    bucket, name = _source_and_name(output)
    try:
        bucket.stat(name)
    except SourceMissing as error:
        if error.details.get("code") == "NoSuchBucket":
            raise
        return
    remedy = "Name another output, or overwrite it with --restart."
    raise BatchFailed(f"{output} already exists.", remedy=remedy)


def _source_and_name(url: str) -> tuple[S3Source, str]:
    above, _, name = url.rpartition("/")
    return S3Source(above), name
