"""Defines an alert: the message that a condition of a function has begun or ended."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import orjson


class Alert(NamedTuple):
    """A condition that has begun or ended, and the receiver of the message."""

    function: str
    revision: str
    condition: str
    url: str
    owner: str
    """The owner of the function, who may list the delivery."""
    begun: bool
    """True if the condition has begun, False if it has ended."""
    figures: Mapping[str, float | str]

    @property
    def event(self) -> str:
        return "alert.begun" if self.begun else "alert.ended"

    @property
    def text(self) -> str:
        """The alert in a sentence."""
        state = "has begun" if self.begun else "has ended"
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"alert {self.condition} of {self.function} {state}: {figures}"

    def body(self, now_s: float) -> bytes:
        """Return the message as Standard Webhooks defines it. Chats show its field `text`."""
        at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        data = {"function": self.function, "revision": self.revision, "condition": self.condition}
        return orjson.dumps(
            {"type": self.event, "timestamp": at, "text": self.text, "data": data | dict(self.figures)}
        )
