"""A message queue and a sink for outputs, as the consumer uses them. Every method raises BusFailed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..jobs.job import Job


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message. `receipt` identifies the delivery when the message is deleted."""

    id: str
    receipt: str
    body: bytes
    received: int = 1
    """How many times the message was delivered, including this one."""
    attributes: Mapping[str, str] = field(default_factory=dict)


class MessageQueue(Protocol):
    """A queue with at-least-once delivery. Its methods do not block the event loop."""

    async def receive(self, limit: int) -> Sequence[Message]:
        """Wait for messages and return up to `limit`, or none after a while.

        Messages that arrive after the caller was cancelled become visible to others at once.
        """

    async def extend(self, messages: Sequence[Message]) -> Sequence[str]:
        """Hide messages from others for another visibility timeout. Return the ids of those that failed."""

    async def delete(self, message: Message) -> None:
        """Remove a message for good."""

    async def release(self, messages: Sequence[Message], delay_s: int) -> None:
        """Make messages visible to others after a delay. The queue counts deliveries and may dead-letter a message."""

    async def close(self) -> None: ...


class Sink(Protocol):
    """Where outputs go."""

    async def put(self, message: Message, job: Job) -> None:
        """Store the output of a COMPLETED job. A second call for a message stores the same again."""

    async def close(self) -> None: ...
