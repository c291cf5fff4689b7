"""Logs the lines that a base or the fetcher prints, and makes the error that reports the end of this process."""

from __future__ import annotations

import logging
import socket
import time

from ....errors import LauncherError
from ...ground.telemetry.log_files import LogLine
from ...ground.telemetry.log_stream import LogStream
from ...ground.telemetry.logs import LogChannel

LOG = logging.getLogger(__name__)
# Quote the last line in the error only if it is at most this old. An older line does not say why the process has ended.
RECENT_S = 5.0


class ChildOutput:
    """Standard output or standard error of a process of the gateway, until the process ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._channel = LogChannel(keep=self._log, kept=1)
        ours, self._theirs = socket.socketpair()
        self._stream = LogStream(ours, self._channel, name)

    def fileno(self) -> int:
        """Return the descriptor for the process. `started` closes it in the gateway."""
        return self._theirs.fileno()

    def started(self) -> None:
        self._theirs.close()

    def close(self) -> None:
        self._theirs.close()
        self._stream.drain()
        self._stream.close()

    def end(self, message: str, remedy: str) -> LauncherError:
        """Stop reading, and return the error that reports the end of the process. Only owners get the process's last
        line of output, because the line may name paths.
        """
        self.close()
        said = [line.text for line in self._channel.tail(1) if line.text and line.at > time.time() - RECENT_S]
        whole = LauncherError(f"{message}: {said[0]}." if said else f"{message}.", remedy=remedy)
        return LauncherError(f"{message}.", remedy=remedy, details={"fault": whole.to_wire()} if said else {})

    def _log(self, line: LogLine) -> None:
        if line.text:
            LOG.warning("%s: %s", self._name, line.text)
