"""Runs an external command to its end, and passes on each line of output as soon as it arrives."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LAST_LINES = 20
# The time between SIGTERM and SIGKILL, in which a command can remove its temporary files.
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How a command ended: its exit status, whether it was ended at its deadline, and its last lines of output."""

    status: int
    late: bool
    lines: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """True if the command did not do its work. The status alone does not show this: podman exits with status 0 when
        it is ended in the middle.
        """
        return self.late or self.status != 0


def run_streamed(
    command: Sequence[str],
    progress: Callable[[str], None],
    *,
    deadline_s: float,
    environ: Mapping[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> CommandOutcome:
    """Run a command until it ends, at most `deadline_s`, and call `progress` with each line that it writes.

    If `progress` raises, or Ctrl-C is pressed, the command and all processes that it has started are ended.
    """
    lines: deque[str] = deque(maxlen=LAST_LINES)
    late = threading.Event()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", pass_fds=pass_fds, env=environ,
        # Start a new process group, so that the command and the processes that it starts can be ended together.
        start_new_session=True,
    ) as process:  # fmt: skip
        deadline = threading.Timer(deadline_s, _expire, (process, late))
        deadline.start()
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                progress(line.rstrip())
            status = process.wait()
        finally:
            deadline.cancel()
            deadline.join()
            _end(process)
    return CommandOutcome(status, late.is_set(), tuple(lines))


def _expire(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process group, unless the exit status of its first process was already read."""
    with contextlib.suppress(ProcessLookupError):
        _signal(process, signal.SIGTERM)
        ended = os.pidfd_open(process.pid)
        try:
            # Do not read the exit status of the process before SIGKILL is sent. After that, `_signal` could not kill
            # the processes that the command has left.
            select.select([ended], [], [], END_TIMEOUT_S)
        finally:
            os.close(ended)
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    # Send nothing once the exit status of the process was read: another process group may have its number by then.
    if process.returncode is not None:
        raise ProcessLookupError
    os.killpg(process.pid, number)
