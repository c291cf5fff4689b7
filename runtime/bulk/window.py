"""The window keeps many lines in flight and writes their answers in the order of the lines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

from ...errors import PilotflameError
from .inputs import InputLine
from .journal import Journal

# For each line in flight, this many answers may wait for an earlier one.
AHEAD = 8
READ_LINES = 512
READ_BYTES = 4 << 20


async def run_in_order(
    lines: Iterator[InputLine],
    answer: Callable[[InputLine], Awaitable[bytes]],
    journal: Journal,
    *,
    max_in_flight: int,
    written: Callable[[InputLine], None],
) -> None:
    """Run all lines through `answer`, and call `written` after each line that is appended to the journal.

    Raise an error that concerns all lines; the answers before it are written.
    """
    in_flight = asyncio.Semaphore(max_in_flight)
    # Places for lines that are started and not yet written.
    unwritten = asyncio.Semaphore(AHEAD * max_in_flight)
    answers: dict[int, tuple[InputLine, bytes]] = {}

    async def run(line: InputLine) -> None:
        try:
            answers[line.number] = line, await answer(line)
        finally:
            in_flight.release()
        # Write all answers up to the first one that is missing.
        while (found := answers.pop(journal.done + 1, None)) is not None:
            journal.append([found[1]])
            unwritten.release()
            written(found[0])

    try:
        async with asyncio.TaskGroup() as tasks:
            while batch := await asyncio.to_thread(_read, lines):
                for line in batch:
                    await unwritten.acquire()
                    await in_flight.acquire()
                    tasks.create_task(run(line))
    except* (PilotflameError, OSError) as group:
        raise group.exceptions[0] from None


def _read(lines: Iterator[InputLine]) -> list[InputLine]:
    """Return the next lines, as many as fit the limits. Blocks."""
    found: list[InputLine] = []
    size_bytes = 0
    for line in itertools.islice(lines, READ_LINES):
        found.append(line)
        size_bytes += len(line.text)
        if size_bytes >= READ_BYTES:
            break
    return found
