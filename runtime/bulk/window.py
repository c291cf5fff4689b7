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


class Window:
    """Runs lines through `answer` and appends to `journal`. `written` is called with the last line written."""

    def __init__(
        self,
        lines: Iterator[InputLine],
        answer: Callable[[InputLine], Awaitable[bytes]],
        journal: Journal,
        *,
        max_in_flight: int,
        written: Callable[[InputLine], None],
    ) -> None:
        self._lines = lines
        self._answer = answer
        self._journal = journal
        self._written = written
        self._in_flight = asyncio.Semaphore(max_in_flight)
        # Places for lines that are started and not yet written.
        self._unwritten = asyncio.Semaphore(AHEAD * max_in_flight)
        self._answers: dict[int, tuple[InputLine, bytes]] = {}

    async def run(self) -> None:
        """Run all lines. Raise an error that concerns all of them; the answers before it are written."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while lines := await asyncio.to_thread(self._read):
                    for line in lines:
                        await self._unwritten.acquire()
                        await self._in_flight.acquire()
                        tasks.create_task(self._run(line))
        except* PilotflameError as group:
            raise group.exceptions[0] from None

    async def _run(self, line: InputLine) -> None:
        try:
            self._answers[line.number] = line, await self._answer(line)
        finally:
            self._in_flight.release()
        # Write all answers up to the first one that is missing.
        while (found := self._answers.pop(self._journal.done + 1, None)) is not None:
            written, answer = found
            self._journal.append([answer])
            self._unwritten.release()
            self._written(written)

    def _read(self) -> list[InputLine]:
        lines: list[InputLine] = []
        size_bytes = 0
        for line in itertools.islice(self._lines, READ_LINES):
            lines.append(line)
            size_bytes += len(line.text)
            if size_bytes >= READ_BYTES:
                break
        return lines
