"""Defines a message queue and a sink as consumers use them. Plugins implement both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....snapshot.sources.access import ANY, Access
from ..stored.job import Job


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message. `receipt` identifies the delivery in later requests to the queue."""

    id: str
    """A part of the idempotency key of the message's job. No other message may have the same id, even after this message was deleted."""
    receipt: str
    body: bytes
    received: int
    """How many times the message was delivered, including this one."""
    attributes: Mapping[str, str]
    sent_s: float
    """When the message was sent, as Unix time in seconds."""
    group: str = ""
    """The message group. The queue delivers the messages of a group in order. "" means that there is no order."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a handler finds beside the body, in `context.extra["message"]`. It must be JSON, because it is stored with the job."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The function whose source is opened: its present secrets, and the rule for what else the source may use."""

    secrets: Callable[[], Mapping[str, str]] = dict[str, str]
    access: Access = ANY
    dialect: Callable[[], str] = str
    """Returns the dialect of the live handler; "" if it is not known yet."""


class MessageQueue(Protocol):
    """A queue that delivers each message at least once. All methods raise BusFailed if a request fails."""

    batch: int
    """The largest number of messages that one request returns."""

    async def receive(self, limit: int, *, wait: bool) -> Sequence[Message]:
        """Return up to `limit` messages, but at most `batch`. With `wait`, wait some seconds for the first message.

        Messages that arrive after the caller was cancelled are released.
        """

    async def check(self) -> None:
        """Raise BusFailed, which says what to set, if the credentials are missing or refused. Ignore other failures,
        because they may be temporary.
        """

    async def depth(self) -> int:
        """Return about how many messages wait to be received."""

    async def extend(self, messages: Sequence[Message]) -> Sequence[str]:
        """Hide messages from other receivers for another lease. Return the ids of messages for which this failed.

        Do nothing if the queue never gives a received message to another receiver.
        """

    async def delete(self, message: Message) -> None: ...

    async def release(self, messages: Sequence[Message], delay_s: int) -> None:
        """Let messages be delivered again, after a delay. After too many deliveries, they go to the dead-letter queue.

        Raise OutputRefused if the dead-letter queue can never accept a message. The message is then not delivered
        again.

        A delay of 0 means that the messages have not failed: they wait for their group, or the gateway ends.
        """

    async def close(self) -> None: ...


class Sink(Protocol):
    """A receiver of the outputs of jobs."""

    async def put(self, message: Message, job: Job) -> None:
        """Send the output of a COMPLETED job. It may be called again for the same message.

        Raise BusFailed, or OutputRefused if each further try would fail, too.
        """

    async def check(self) -> None:
        """Raise BusFailed, which says what to set, if the destination does not exist. Ignore other failures, because
        they may be temporary.
        """

    async def close(self) -> None: ...
