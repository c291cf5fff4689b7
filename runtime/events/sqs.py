"""Receives and deletes messages of an SQS queue, which delivers each message at least once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import BusFailed
from ..settings.event_source import MAX_VISIBILITY_S, EventSource
from .aws import AwsClient

POLL_S = 20
"""How long a request waits for messages: as long as SQS allows, so that an empty queue needs few requests."""
BATCH = 10
"""The most messages that SQS allows in one request."""
_COUNT = "ApproximateReceiveCount"
_MAX_COUNT_CHARS = 10
_REQUIRED = ("MessageId", "ReceiptHandle", "Body")


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message. `receipt` identifies the delivery in later requests to SQS."""

    id: str
    receipt: str
    body: bytes
    received: int = 1
    """How many times the message was delivered, including this one."""
    attributes: Mapping[str, str] = field(default_factory=dict)


class MessageQueue:
    """The queue of an event source. All methods raise BusFailed if a request fails."""

    def __init__(self, source: EventSource) -> None:
        self._url = source.queue
        self._visibility_s = source.visibility_s
        self._aws = AwsClient("sqs", f"The queue {source.queue}", source)

    async def receive(self, limit: int) -> Sequence[Message]:
        """Wait up to POLL_S for messages and return up to `limit` of them, at most BATCH.

        Messages that arrive after the caller was cancelled are released.
        """

        def poll(client: Any) -> list[Message]:
            response = client.receive_message(
                QueueUrl=self._url, MaxNumberOfMessages=min(limit, BATCH), WaitTimeSeconds=POLL_S,
                VisibilityTimeout=self._visibility_s,
                MessageSystemAttributeNames=[_COUNT], MessageAttributeNames=["traceparent"],
            )  # fmt: skip
            return [self._message(raw) for raw in response.get("Messages", ())]

        return await self._aws.call(poll, self._release_abandoned)

    async def extend(self, messages: Sequence[Message]) -> Sequence[str]:
        """Hide messages from other consumers for another visibility timeout.

        Return the ids of the messages for which this failed.
        """
        return await self._aws.call(lambda client: self._hide(client, messages, self._visibility_s))

    async def delete(self, message: Message) -> None:
        await self._aws.call(
            lambda client: client.delete_message(QueueUrl=self._url, ReceiptHandle=message.receipt)
        )

    async def release(self, messages: Sequence[Message], delay_s: int) -> None:
        """Make messages visible to other consumers after a delay.

        If they were delivered too often, SQS moves them to the dead-letter queue instead.
        """
        await self._aws.call(lambda client: self._hide(client, messages, delay_s))

    async def close(self) -> None:
        await self._aws.close()

    def _hide(self, client: Any, messages: Sequence[Message], visibility_s: int) -> list[str]:
        """Set the visibility timeout of messages. Return the ids of the messages for which this failed."""
        failed: list[str] = []
        for begin in range(0, len(messages), BATCH):
            batch = messages[begin : begin + BATCH]
            timeout_s = min(visibility_s, MAX_VISIBILITY_S)
            entries = [
                {"Id": str(index), "ReceiptHandle": message.receipt, "VisibilityTimeout": timeout_s}
                for index, message in enumerate(batch)
            ]
            response = client.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)
            failed += [batch[int(entry["Id"])].id for entry in response.get("Failed", ())]
        return failed

    def _message(self, raw: dict[str, Any]) -> Message:
        if missing := [name for name in _REQUIRED if not isinstance(raw.get(name), str)]:
            raise self._malformed(f"a message without {', '.join(missing)}")
        count = str(raw.get("Attributes", {}).get(_COUNT, "1"))
        if not (count.isascii() and count.isdecimal() and len(count) < _MAX_COUNT_CHARS):
            raise self._malformed(f"a message whose {_COUNT} is not a number")
        attributes = {
            name: str(value["StringValue"])
            for name, value in raw.get("MessageAttributes", {}).items()
            if "StringValue" in value
        }
        return Message(raw["MessageId"], raw["ReceiptHandle"], raw["Body"].encode(), int(count), attributes)

    def _malformed(self, what: str) -> BusFailed:
        return BusFailed(
            f"The queue {self._url} sent {what}.",
            remedy="Check that the queue's URL and `endpoint_url` are those of SQS or compatible with it.",
            details={"code": "malformed"},
        )

    def _release_abandoned(self, messages: Sequence[Message]) -> None:
        """Release messages that arrived after the poll was cancelled.

        If this fails, they become visible when their visibility timeout ends.
        """
        with contextlib.suppress(BusFailed):
            self._aws.call_blocking(lambda client: self._hide(client, messages, 0))
