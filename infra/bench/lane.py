"""A lane: one contestant in a process of its own, that waits between its turns.

The clock excludes imports, kept buffers, other preparations of the contestant, and the release of the round's memory. The
lane's environment makes malloc return large freed blocks to the kernel (MALLOC_MMAP_THRESHOLD_ at glibc's own initial
value, which stops it from growing). Otherwise memory that a library allocates anew would be fresh in the first round only.

    python infra/bench/lane.py MODULE:CLASS JSON      one turn per line of stdin
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Protocol, Self

_START_S = 120.0
_TURN_S = 300.0
_FRESH = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


class LaneError(Exception):
    """A contestant failed, or was wrong."""


class Contestant(Protocol):
    """What a lane runs. Made from keyword arguments, JSON all of them."""

    def run(self, **turn: Any) -> dict[str, Any] | None:
        """Run one turn, on the clock. Its result is reported beside the seconds (its own `seconds` counts instead)."""
        ...

    def check(self) -> None:
        """Raise unless what the turn brought is right. Off the clock."""
        ...

    def clear(self) -> None:
        """Let go of what the turn brought. Off the clock."""
        ...


class Lane:
    """The parent's end of it."""

    def __init__(
        self, name: str, kind: str, env: dict[str, str] | None = None, keep_freed: bool = False, **given: Any
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile(prefix="lane-")  # noqa: SIM115  lives as long as the lane
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **({} if keep_freed else _FRESH), **(env or {})},
        )
        self._buffer = b""

    def wait_ready(self) -> None:
        """Until the contestant has imported and prepared all it needs."""
        self._line(_START_S)

    def turn(self, check: bool = False, **turn: Any) -> dict[str, Any]:
        """One turn; at least `seconds` is in the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"check": check, **turn}).encode() + b"\n")
        self._process.stdin.flush()
        return self._line(_TURN_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, descriptor = time.monotonic() + timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(descriptor, 65536) if ready else b""
            if not piece:
                raise LaneError(f"{self.name} gave no answer in {timeout_s:.0f} s: {self._errors()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _errors(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        return self._log.read().decode(errors="replace")


def _serve(contestant: Contestant, answers: int) -> None:
    os.write(answers, b"{}\n")
    for line in sys.stdin:
        turn = json.loads(line)
        check = turn.pop("check")
        gc.collect()
        started_ns = time.perf_counter_ns()
        told = contestant.run(**turn)
        seconds = (time.perf_counter_ns() - started_ns) / 1e9
        if check:
            contestant.check()
        contestant.clear()
        gc.collect()
        os.write(answers, json.dumps({"seconds": seconds, **(told or {})}).encode() + b"\n")


def main() -> None:
    kind, given = sys.argv[1:]
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries that print do not disturb the answers
    module, _, name = kind.partition(":")
    _serve(getattr(importlib.import_module(module), name)(**json.loads(given)), answers)


if __name__ == "__main__":
    main()
