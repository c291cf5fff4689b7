"""The command that sends many lines through one function: `pilotflame batch`."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import display, options

if TYPE_CHECKING:
    from ..bulk.inputs import Inputs
    from ..bulk.journal import Journal

EXIT_SOME_FAILED = 4
IN_FLIGHT = 64


@click.command()
@click.argument("function")
@click.argument("source", metavar="INPUT")
@click.argument("output", metavar="OUTPUT")
@click.option(
    "--max-in-flight", type=click.IntRange(1, 4096), default=IN_FLIGHT, show_default=True,
    help="Lines at the gateway at a time.",
)  # fmt: skip
@click.option("--restart", is_flag=True, help="Begin anew, whatever OUTPUT holds.")
@options.gateway
@options.as_json
def batch(
    *, function: str, source: str, output: str, max_in_flight: int, restart: bool, url: str, as_json: bool
) -> None:
    """Run FUNCTION with every line of INPUT, and write the answers to OUTPUT, line for line.

    INPUT is a .jsonl file, a folder of them, or s3://bucket/…; OUTPUT is a .jsonl file or s3://bucket/key. A line
    that fails leaves {"error": …} in its place. Lines are jobs of the lowest priority: callers go first.

    After Ctrl-C, kill -9 or a crash the same command goes on where it stopped; what has an answer is not run again.

    \b
    Exit codes: 0 all lines have answers, 1 the batch could not go on, 4 some lines failed, 130 interrupted.

    \b
    Examples:
      pilotflame batch embed texts.jsonl vectors.jsonl
      pilotflame batch embed s3://bucket/texts/ s3://bucket/vectors.jsonl --max-in-flight 256
    """
    from ..bulk.inputs import Inputs  # noqa: PLC0415  what reads sources takes time to import, and --help needs none of it
    from ..bulk.journal import Journal  # noqa: PLC0415

    started_s = time.monotonic()
    inputs = Inputs.open(source)
    path = _working_file(output)
    if output != str(path) and not restart:
        _check_absent(output, path)
    journal = Journal(path, function=function, digest=inputs.digest, restart=restart)
    resumed = journal.done
    try:
        _run(inputs, journal, function, url, max_in_flight)
        journal.sync()
        if output != str(path):
            _upload(path, output)
        journal.finish()
    except KeyboardInterrupt:
        display.say(f"interrupted: {journal.done} lines are done; the same command goes on from there")
        raise
    finally:
        journal.close()
    if output != str(path):
        path.unlink()
    _report(journal, resumed, output, time.monotonic() - started_s, as_json=as_json)
    if journal.failed:
        raise click.exceptions.Exit(EXIT_SOME_FAILED)


def _run(inputs: Inputs, journal: Journal, function: str, url: str, max_in_flight: int) -> None:
    import asyncio  # noqa: PLC0415  see batch

    import uvloop  # noqa: PLC0415

    from ..bulk.submitter import Submitter  # noqa: PLC0415
    from ..bulk.window import Window  # noqa: PLC0415

    begun_s, before = time.monotonic(), journal.done
    with display.tally(f"{function}") as told:

        def tell(line: Any) -> None:
            rate = (journal.done - before) / max(time.monotonic() - begun_s, 0.001)
            failed = f", {journal.failed} failed" if journal.failed else ""
            told(line.end, inputs.total_bytes, f"{journal.done:,} lines, {rate:,.0f}/s{failed}")

        async def go() -> None:
            async with Submitter(url, function, api_key=options.given_key(), run=journal.run) as asker:
                lines = inputs.lines(journal.done)
                await Window(lines, asker.ask, journal, max_in_flight=max_in_flight, told=tell).run()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(go())


def _report(journal: Journal, resumed: int, output: str, seconds: float, *, as_json: bool) -> None:
    rate = (journal.done - resumed) / max(seconds, 0.001)
    if as_json:
        return display.print_json(
            {
                "output": output, "lines": journal.done, "failed": journal.failed, "resumed_at": resumed,
                "seconds": round(seconds, 3), "lines_per_s": round(rate, 1),
            }
        )  # fmt: skip
    before = f", {resumed} of them before" if resumed else ""
    failed = f"; {journal.failed} failed, their lines say why" if journal.failed else ""
    click.echo(f"{journal.done} lines{before}, {seconds:.1f} s, {rate:.0f}/s{failed}: {output}")
    return None


def _working_file(output: str) -> Path:
    """Where answers are written: S3 cannot be appended to, so what goes there is kept in the state folder until then."""
    if not output.startswith("s3://"):
        return Path(output)
    from ..settings.gateway_settings import default_state_dir  # noqa: PLC0415  see batch

    folder = default_state_dir(os.environ) / "batches"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(output.encode()).hexdigest()[:32]}.jsonl"


def _check_absent(output: str, path: Path) -> None:
    from ...errors import BatchFailed, SourceMissing  # noqa: PLC0415  see batch
    from ...snapshot.sources.s3 import S3Source  # noqa: PLC0415

    if path.exists():  # one that goes on: it looked when it began
        return
    above, _, name = output.rpartition("/")
    try:
        S3Source(above).stat(name)
    except SourceMissing as error:
        if error.details.get("code") == "NoSuchBucket":
            raise
        return
    raise BatchFailed(
        f"{output} is there already.", remedy="Name another output, or overwrite it with --restart."
    )


def _upload(path: Path, output: str) -> None:
    from ...snapshot.sources.s3 import S3Source  # noqa: PLC0415  see batch

    above, _, name = output.rpartition("/")
    S3Source(above).put(name, path)


COMMANDS = (batch,)
