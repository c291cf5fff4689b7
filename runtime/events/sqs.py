"""SQS as a bus."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ...errors import BusFailed
from ..settings.event_source import MAX_VISIBILITY_S, EventSource
from .aws import Aws
from .bus import Message

POLL_S = 20
"""The longest that SQS waits with an empty answer: the fewest requests while nothing comes."""
BATCH = 10
"""The most messages of one request."""
_COUNT = "ApproximateReceiveCount"
MAX_COUNT_CHARS = 10
_PARTS = ("MessageId", "ReceiptHandle", "Body")


class SqsBus:
    """A queue of SQS."""

    def __init__(self, source: EventSource) -> None:
        self._url = source.queue
        self._visibility_s = source.visibility_s
        self._aws = Aws(
            "sqs", f"The queue {source.queue}",
            endpoint=source.sqs_endpoint, region=source.region_name, profile=source.profile,
        )  # fmt: skip
        self.name = source.queue_name

    async def receive(self, limit: int) -> Sequence[Message]:
        def poll(client: Any) -> list[Message]:
            answer = client.receive_message(
                QueueUrl=self._url, MaxNumberOfMessages=min(limit, BATCH), WaitTimeSeconds=POLL_S,
                VisibilityTimeout=self._visibility_s,
                MessageSystemAttributeNames=[_COUNT], MessageAttributeNames=["traceparent"],
            )  # fmt: skip
            return [self._message(raw) for raw in answer.get("Messages", ())]

        return await self._aws.ask(poll, self._not_wanted)

    async def hold(self, messages: Sequence[Message]) -> Sequence[str]:
        return await self._aws.ask(lambda client: self._set(client, messages, self._visibility_s))

    async def delete(self, message: Message) -> None:
        await self._aws.ask(
            lambda client: client.delete_message(QueueUrl=self._url, ReceiptHandle=message.receipt)
        )

    async def give_back(self, messages: Sequence[Message], delay_s: int) -> None:
        await self._aws.ask(lambda client: self._set(client, messages, delay_s))

    async def close(self) -> None:
        await self._aws.close()

    def _set(self, client: Any, messages: Sequence[Message], visibility_s: int) -> list[str]:
        """Sets the visibility; the ids of the messages of which that failed."""
        failed: list[str] = []
        for some in _batched(messages):
            entries = [
                {
                    "Id": str(index),
                    "ReceiptHandle": message.receipt,
                    "VisibilityTimeout": min(visibility_s, MAX_VISIBILITY_S),
                }
                for index, message in enumerate(some)
            ]
            answer = client.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)
            failed += [some[int(entry["Id"])].id for entry in answer.get("Failed", ())]
        return failed

    def _message(self, raw: dict[str, Any]) -> Message:
        parts = [raw.get(name) for name in _PARTS]
        if lacking := [name for name, part in zip(_PARTS, parts, strict=True) if not isinstance(part, str)]:
            raise self._malformed(f"a message without {', '.join(lacking)}")
        count = str(raw.get("Attributes", {}).get(_COUNT, "1"))
        if not (count.isascii() and count.isdecimal() and len(count) < MAX_COUNT_CHARS):
            raise self._malformed(f"a message whose {_COUNT} is no number")
        attributes = {
            name: str(value["StringValue"])
            for name, value in raw.get("MessageAttributes", {}).items()
            if "StringValue" in value
        }
        name, receipt, body = map(str, parts)
        return Message(name, receipt, body.encode(), int(count), attributes)

    def _malformed(self, what: str) -> BusFailed:
        return BusFailed(
            f"The queue {self._url} answers with {what}.",
            remedy="Check that the queue's URL and `endpoint_url` are those of SQS, or of what speaks as it does.",
            details={"code": "malformed"},
        )

    def _not_wanted(self, messages: Sequence[Message]) -> None:
        """They came after nobody polled any more."""
        with contextlib.suppress(BusFailed):  # then they are kept from others for a while
            self._aws.ask_here(lambda client: self._set(client, messages, 0))


def _batched(messages: Sequence[Message]) -> list[Sequence[Message]]:
    return [messages[begin : begin + BATCH] for begin in range(0, len(messages), BATCH)]
