"""Defines the sinks, which send the outputs of jobs to another queue or to S3."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from ....errors import BusFailed, OutputRefused
from ...jobs.events.message_queue import Identity, Message
from ...jobs.stored.job import Job
from .aws import AwsClient
from .settings import SqsSource

_FINAL = (
    "NonExistentQueue", "QueueDoesNotExist", "NoSuchBucket", "InvalidParameterValue", "InvalidMessageContents", "EntityTooLarge",
)  # fmt: skip
"""Parts of the names of errors that each further try would raise, too."""


class Destination(AwsClient):
    """A queue or a bucket for outputs."""

    async def send(self, request: Callable[[Any], object], job: Job) -> None:
        """Call `request`, which sends the output of a job. Raise OutputRefused if each further try would fail, too, and
        BusFailed for any other failure.
        """
        try:
            await self.call(request)
        except BusFailed as error:
            if not _is_final(error):
                raise
            size = f"{error.message} The output has {len(job.output or b'')} bytes."
            raise OutputRefused(size, remedy=error.remedy, details=error.details) from error

    async def check(self) -> None:
        """Do nothing: each request that would find the destination needs a right that writing outputs does not need."""


class QueueSink(Destination):
    """A sink that sends each output to a queue: JSON and text as text, any other output as base64."""

    def __init__(self, source: SqsSource, result: str, identity: Identity) -> None:
        super().__init__("sqs", f"Outputs to {result}", source, identity)
        self._result = result
        self._url = "" if result.startswith("sqs://") else result

    async def put(self, message: Message, job: Job) -> None:
        """Send the output of a COMPLETED job. A second call for the same message sends a second time."""
        await self.send(lambda client: self._send(client, message, job), job)

    async def check(self) -> None:
        try:
            await self.call(self._find)
        except BusFailed as error:
            if _is_final(error):
                raise

    def _find(self, client: Any) -> None:
        if not self._url:
            name = self._result.removeprefix("sqs://")
            self._url = client.get_queue_url(QueueName=name)["QueueUrl"]

    def _send(self, client: Any, message: Message, job: Job) -> None:
        self._find(client)
        output, attributes = job.output or b"null", _attributes(message, job)
        if not job.output_type or job.output_type.startswith("text/"):
            text = output.decode("utf-8", "replace")
        else:
            text = base64.b64encode(output).decode()
            attributes["encoding"] = "base64"
        fifo = {"MessageGroupId": message.group or job.function, "MessageDeduplicationId": message.id}
        client.send_message(
            QueueUrl=self._url, MessageBody=text,
            MessageAttributes={
                name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
            },
            **(fifo if self._url.endswith(".fifo") else {}),
        )  # fmt: skip


class ObjectSink(Destination):
    """A sink that writes each output to an S3 object.

    The message's id is the object's name, so a second output of the same message replaces the first.
    """

    def __init__(self, source: SqsSource, result: str, identity: Identity) -> None:
        super().__init__("s3", f"Outputs to {result}", source, identity)
        self._bucket, _, prefix = result.removeprefix("s3://").partition("/")
        self._prefix = prefix.strip("/")

    async def put(self, message: Message, job: Job) -> None:
        name = quote(message.id, safe="") + ("" if job.output_type else ".json")
        request = {
            "Bucket": self._bucket,
            "Key": f"{self._prefix}/{name}" if self._prefix else name,
            "Body": job.output or b"null",
            "ContentType": job.output_type or "application/json",
            "Metadata": _attributes(message, job),
        }
        await self.send(lambda client: client.put_object(**request), job)


def _is_final(error: BusFailed) -> bool:
    return any(part in str(error.details.get("code")) for part in _FINAL)


def _attributes(message: Message, job: Job) -> dict[str, str]:
    attributes = {"job-id": job.id, "message-id": message.id, "function": job.function}
    if job.output_type:
        attributes["content-type"] = job.output_type
    return attributes


def open_sink(source: SqsSource, identity: Identity) -> QueueSink | ObjectSink | None:
    """Return the sink for the setting `result` of the source, or None if the setting is not set."""
    if source.result is None:
        return None
    return (ObjectSink if source.result.startswith("s3://") else QueueSink)(source, source.result, identity)
