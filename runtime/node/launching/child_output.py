"""Logs what a base or the fetcher prints, and remembers its last line."""

from __future__ import annotations

import logging
import socket

from ...ground.telemetry.log_files import LogLine
from ...ground.telemetry.log_stream import LogStream
from ...ground.telemetry.logs import LogChannel

LOG = logging.getLogger(__name__)


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

    def close(self) -> str:
        """Stop reading, and return the last line that the process has printed."""
        self._theirs.close()
        self._stream.drain()
        self._stream.close()
        return next((line.text for line in self._channel.tail(1)), "")

    def _log(self, line: LogLine) -> None:
        if line.text:
            LOG.warning("%s: %s", self._name, line.text)
