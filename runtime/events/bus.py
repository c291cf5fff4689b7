"""The bus: what is asked of a queue of messages, whichever it is; and of who takes the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..jobs.job import Job


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it was received: `receipt` is what may delete this delivery of it."""

    id: str
    receipt: str
    body: bytes
    received: int = 1
    """How often it was delivered, this time among them."""
    attributes: Mapping[str, str] = field(default_factory=dict)


class Bus(Protocol):
    """A queue that delivers at least once. Everything raises BusFailed; nothing blocks the event loop."""

    @property
    def name(self) -> str:
        """What the queue is called, within its account."""

    async def receive(self, limit: int) -> Sequence[Message]:
        """Up to `limit` messages, as soon as there are any; none after a while without. Who is cancelled while it waits
        leaves no message behind: what still comes is given back.
        """

    async def hold(self, messages: Sequence[Message]) -> Sequence[str]:
        """Keeps them from others for another while; the ids of those of which that failed."""

    async def delete(self, message: Message) -> None:
        """It is done with, for good."""

    async def give_back(self, messages: Sequence[Message], delay_s: int) -> None:
        """Others may have them, after a delay; the bus counts how often that happens, and may put them aside."""

    async def close(self) -> None:
        """Ends its connections."""


class Sink(Protocol):
    """Where answers go."""

    async def put(self, message: Message, job: Job) -> None:
        """Keeps the answer of a job that is COMPLETED; the same again if it is told twice. BusFailed."""

    async def close(self) -> None:
        """Ends its connections."""
