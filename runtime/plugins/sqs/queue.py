"""Receives and deletes messages of an SQS queue, which delivers each message at least once."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import BusFailed
from ....foreign_json import is_compact
from ...jobs.events.message_queue import Identity, Message, Sink
from .aws import AwsClient, is_refusal
from .settings import MAX_VISIBILITY_S, SqsSource
from .sinks import open_sink

POLL_S = 20
"""A request waits for messages for this time, the longest that SQS allows. So an empty queue needs few requests."""
BATCH = 10
"""The most messages that SQS allows in one request."""
_COUNT, _GROUP, _SENT = "ApproximateReceiveCount", "MessageGroupId", "SentTimestamp"
_DEPTH = "ApproximateNumberOfMessages"


class SqsQueue(AwsClient):
    """A queue of SQS. All methods raise BusFailed if a request fails."""

    batch = BATCH

    def __init__(self, source: SqsSource, identity: Identity) -> None:
        super().__init__("sqs", f"The queue {source.queue}", source, identity)
        self._url = source.queue
        self._visibility_s = source.visibility_s

    async def receive(self, limit: int, *, wait: bool) -> Sequence[Message]:
        """Return up to `limit` messages, at most BATCH. With `wait`, wait up to POLL_S for the first message.

        If the caller is cancelled, messages that this request still receives are released.
        """

        def poll(client: Any) -> list[Message]:
            response = client.receive_message(
                QueueUrl=self._url, MaxNumberOfMessages=min(limit, BATCH), WaitTimeSeconds=POLL_S * wait,
                VisibilityTimeout=self._visibility_s,
                MessageSystemAttributeNames=["All"], MessageAttributeNames=["All"],
            )  # fmt: skip
            account, region = self._url.split("/")[-2], client.meta.region_name
            arn = f"arn:{client.meta.partition}:sqs:{region}:{account}:{self._source.queue_name}"
            of_queue = {"eventSource": "aws:sqs", "eventSourceARN": arn, "awsRegion": region}
            fifo = self._url.endswith(".fifo")
            return [_message(raw, of_queue, fifo=fifo) for raw in response.get("Messages", ())]

        return await self.call(poll, self._release_abandoned)

    async def check(self) -> None:
        # Send a receipt that the queue has never given. The answer tells only whether the credentials are valid.
        request = {"QueueUrl": self._url, "ReceiptHandle": "check", "VisibilityTimeout": 0}
        try:
            await self.call(lambda client: client.change_message_visibility(**request))
        except BusFailed as error:
            if is_refusal(error):
                raise

    async def depth(self) -> int:
        """Return the approximate number of messages that wait in the queue."""
        request = {"QueueUrl": self._url, "AttributeNames": [_DEPTH]}
        return await self.call(
            lambda client: int(client.get_queue_attributes(**request)["Attributes"][_DEPTH])
        )

    async def extend(self, messages: Sequence[Message]) -> Sequence[str]:
        """Hide messages for another visibility timeout. Return the ids of the messages for which this failed."""
        return await self.call(lambda client: self._hide(client, messages, self._visibility_s))

    async def delete(self, message: Message) -> None:
        request = {"QueueUrl": self._url, "ReceiptHandle": message.receipt}
        await self.call(lambda client: client.delete_message(**request))

    async def release(self, messages: Sequence[Message], delay_s: int) -> None:
        """Make messages visible after a delay. A message received too often goes to the dead-letter queue."""
        await self.call(lambda client: self._hide(client, messages, delay_s))

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

    def _release_abandoned(self, messages: Sequence[Message]) -> None:
        """Release messages that arrived after the poll was cancelled."""
        # If the release fails, the messages become visible when their visibility timeout ends.
        with contextlib.suppress(BusFailed):
            self.call_blocking(lambda client: self._hide(client, messages, 0))


def open_queue(source: SqsSource, identity: Identity) -> tuple[SqsQueue, Sink | None]:
    """Return the queue, and the sink if the setting `result` names one."""
    return SqsQueue(source, identity), open_sink(source, identity)


def _message(raw: dict[str, Any], of_queue: Mapping[str, str], *, fifo: bool) -> Message:
    message_id, facts = raw["MessageId"], raw.get("Attributes", {})
    count, sent_s = max(1, int(facts.get(_COUNT, "1"))), int(facts.get(_SENT, "0")) / 1000 or time.time()
    # Only a FIFO queue keeps an order within a group. In a standard queue, the group only names the message's tenant.
    group = str(facts.get(_GROUP, "")) if fifo else ""
    attributes = {
        name: str(value["StringValue"])
        for name, value in raw.get("MessageAttributes", {}).items()
        if "StringValue" in value
    }
    body, record = raw["Body"].encode(), {**_record(raw), **of_queue}
    return Message(message_id, raw["ReceiptHandle"], body, count, attributes, sent_s, group, record)


def _record(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the record that a Lambda function gets in its event. The record has the body only if the job's
    input does not keep the exact text of the body.
    """
    text = raw["Body"]
    return {
        "messageId": raw["MessageId"], "receiptHandle": raw["ReceiptHandle"], "attributes": raw.get("Attributes", {}),
        "messageAttributes": {name: _attribute(value) for name, value in raw.get("MessageAttributes", {}).items()},
        "md5OfBody": raw.get("MD5OfBody", ""), **({} if is_compact(text.encode()) else {"body": text}),
    }  # fmt: skip


def _attribute(value: Mapping[str, Any]) -> dict[str, Any]:
    found = {"dataType": value["DataType"], "stringListValues": [], "binaryListValues": []}
    if "BinaryValue" in value:
        return found | {"binaryValue": base64.b64encode(value["BinaryValue"]).decode()}
    return found | {"stringValue": value.get("StringValue", "")}
