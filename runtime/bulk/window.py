"""The window keeps many lines in flight, writes answers in the order of the lines, and bounds how far it reads ahead."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
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
        self._max_in_flight = max_in_flight
        self._written = written
        self._ready: deque[InputLine] = deque()
        self._reading = asyncio.Lock()
        self._ended = False
        self._answers: dict[int, tuple[InputLine, bytes]] = {}
        self._advanced = asyncio.Condition()
        self._failure: PilotflameError | None = None

    async def run(self) -> None:
        """Run all lines. An error that concerns all of them is raised; answers that precede it are written."""
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(self._work()) for _ in range(self._max_in_flight)]
            for worker in workers:
                worker.add_done_callback(lambda _: self._stop(workers))
        if self._failure is not None:
            raise self._failure

    def _stop(self, workers: list[asyncio.Task[None]]) -> None:
        if self._failure is not None:
            for worker in workers:
                worker.cancel()

    async def _work(self) -> None:
        while (line := await self._next()) is not None:
            try:
                answer = await self._answer(line)
            except PilotflameError as error:
                self._failure = self._failure or error
                return
            self._answers[line.number] = line, answer
            if line.number == self._journal.done + 1:
                self._write()
                async with self._advanced:
                    self._advanced.notify_all()

    async def _next(self) -> InputLine | None:
        """Return the next line as soon as it is not too far ahead; None after the last."""
        async with self._reading:
            if not self._ready and not self._ended:
                try:
                    await self._read()
                except PilotflameError as error:
                    self._failure, self._ended = self._failure or error, True
            if not self._ready or self._failure is not None:
                return None
            async with self._advanced:
                farthest = AHEAD * self._max_in_flight
                await self._advanced.wait_for(lambda: self._ready[0].number - self._journal.done <= farthest)
            return self._ready.popleft()

    async def _read(self) -> None:
        def read() -> list[InputLine]:
            found: list[InputLine] = []
            size_bytes = 0
            for line in itertools.islice(self._lines, READ_LINES):
                found.append(line)
                size_bytes += len(line.text)
                if size_bytes >= READ_BYTES:
                    break
            return found

        found = await asyncio.to_thread(read)
        self._ready.extend(found)
        self._ended = not found

    def _write(self) -> None:
        """Write all answers up to the first one that is missing."""
        lines: list[bytes] = []
        number = self._journal.done + 1
        last: InputLine | None = None
        while (found := self._answers.pop(number, None)) is not None:
            last, answer = found
            lines.append(answer)
            number += 1
        self._journal.append(lines)
        if last is not None:
            self._written(last)
