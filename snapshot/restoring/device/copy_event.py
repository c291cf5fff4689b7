"""Defines the event that marks the end of a copy to a device."""

from __future__ import annotations

from typing import Protocol


class CopyEvent(Protocol):
    """The end of one copy to the device."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until the copy has ended."""

    def precede(self) -> None:
        """Let operations that this thread submits to the device from now on run after the copy. May return before its end."""
