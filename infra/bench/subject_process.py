"""A subject of a comparison in a process of its own, which waits between its turns.

Imports, kept buffers, and the release of memory are not measured. The environment makes malloc return large freed blocks
to the kernel. Otherwise only the first round of a library that allocates would get fresh memory.

    python infra/bench/subject_process.py MODULE:CLASS JSON      one turn for each line of standard input
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
from typing import Any, Protocol, Self

_TURN_S, _STOP_S = 300.0, 10.0
# The initial threshold of glibc, which does not grow once it is set.
_FRESH = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


class SubjectError(Exception):
    """A subject failed, or its result was wrong."""


class Subject(Protocol):
    """What the process runs. It is made from keyword arguments, which are JSON."""

    def run(self, **turn: Any) -> None:
        """Run one turn, which is measured."""
        ...

    def check(self) -> None:
        """Raise an error if the result of the turn is wrong. This is not measured."""
        ...

    def clear(self) -> None:
        """Release the result of the turn. This is not measured."""
        ...


class SubjectProcess:
    """The process of a subject, as seen by the benchmark."""

    def __init__(self, kind: str, env: dict[str, str] | None = None, **arguments: Any) -> None:
        self._kind = kind
        # The file stays open as long as the process lives.
        self._log = tempfile.TemporaryFile(prefix="subject-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_FRESH, **(env or {})},
        )

    def turn(self, check: bool = False, **turn: Any) -> float:
        """Run one turn. Return its duration in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"check": check, **turn}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SubjectError(f"{self._kind} has ended: {self._errors()}") from error
        ready, _, _ = select.select([self._process.stdout], [], [], _TURN_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise SubjectError(f"{self._kind} did not answer within {_TURN_S:.0f} s: {self._errors()}")
        return float(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Close the input. The process then removes its files and ends.
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_STOP_S)
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _errors(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        return self._log.read().decode(errors="replace")


def _serve(subject: Subject, answers: int) -> None:
    for line in sys.stdin:
        turn = json.loads(line)
        check = turn.pop("check")
        gc.collect()
        started_ns = time.perf_counter_ns()
        subject.run(**turn)
        seconds = (time.perf_counter_ns() - started_ns) / 1e9
        if check:
            subject.check()
        subject.clear()
        gc.collect()
        os.write(answers, f"{seconds}\n".encode())


def main() -> None:
    kind, arguments = sys.argv[1:]
    answers = os.dup(1)
    # Send the output of libraries that print to standard error, so that it does not disturb the answers.
    os.dup2(2, 1)
    module, _, name = kind.partition(":")
    _serve(getattr(importlib.import_module(module), name)(**json.loads(arguments)), answers)


if __name__ == "__main__":
    main()
