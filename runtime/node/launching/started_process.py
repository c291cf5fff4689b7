"""Starts a process of the gateway without a copy of the gateway's page tables.

`subprocess` uses vfork, which copies no page tables. uvloop would fork, and the event loop could not run while the
kernel copies the page tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence


class StartedProcess:
    """A process in a session of its own, so that no signal of the gateway's terminal reaches the process."""

    @classmethod
    async def start(
        cls, command: Sequence[str | bytes], *, stdin: int, stdout: int, stderr: int, env: Mapping[str, str]
    ) -> StartedProcess:
        """Start a process with these descriptors. Raise OSError if it cannot be started. If the caller is cancelled
        meanwhile, kill the process.
        """
        # Use a thread, because Popen waits until the program is executed.
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                subprocess.Popen, command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd="/",
                start_new_session=True,
            )
        )  # fmt: skip
        try:
            return cls(await asyncio.shield(opening))
        except asyncio.CancelledError:
            # Wait for the start before the caller closes the descriptors, which must stay open until the process has
            # them.
            with contextlib.suppress(OSError):
                cls(await opening).kill()
            raise

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        try:
            self._watched = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._watched, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        self._ended.set_result(self._process.wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        """Wait for the end of the process, and return its exit code. If a signal has killed it, return the negative
        number of the signal.
        """
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._process.kill()
