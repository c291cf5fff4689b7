"""Where the answers of messages go: another queue, or S3."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

from ..jobs.job import Job
from ..settings.event_source import EventSource
from .aws import Aws
from .bus import Message, Sink

TEXT = "text/"


def open_sink(source: EventSource) -> Sink | None:
    """The sink that the source names, if it names one."""
    if source.result is None:
        return None
    return ObjectSink(source) if source.result.startswith("s3://") else QueueSink(source)


class QueueSink:
    """Sends answers to a queue: JSON as it is, text as text, else base64. What it answers is in the attributes."""

    def __init__(self, source: EventSource) -> None:
        self._result = source.result or ""
        self._url = "" if self._result.startswith("sqs://") else self._result
        self._aws = Aws(
            "sqs", f"Answers to {self._result}",
            endpoint=source.sqs_endpoint, region=source.region_name, profile=source.profile,
        )  # fmt: skip

    async def put(self, message: Message, job: Job) -> None:
        await self._aws.ask(lambda client: self._send(client, message, job))

    async def close(self) -> None:
        await self._aws.close()

    def _send(self, client: Any, message: Message, job: Job) -> None:
        if not self._url:
            name = self._result.removeprefix("sqs://")
            self._url = client.get_queue_url(QueueName=name)["QueueUrl"]
        body, facts = _text(job), _facts(message, job)
        if not _is_text(job):
            facts["encoding"] = "base64"
        ordered = {"MessageGroupId": job.function, "MessageDeduplicationId": message.id}
        client.send_message(
            QueueUrl=self._url, MessageBody=body,
            MessageAttributes={
                name: {"DataType": "String", "StringValue": value} for name, value in facts.items()
            },
            **(ordered if self._url.endswith(".fifo") else {}),
        )  # fmt: skip


class ObjectSink:
    """Puts each answer to an object named after its message, so that the same answer told twice is one object."""

    def __init__(self, source: EventSource) -> None:
        result = source.result or ""
        self._bucket, _, prefix = result.removeprefix("s3://").partition("/")
        self._prefix = prefix.strip("/")
        self._aws = Aws(
            "s3", f"Answers to {result}",
            endpoint=source.endpoint_url, region=source.region_name, profile=source.profile,
        )  # fmt: skip

    async def put(self, message: Message, job: Job) -> None:
        kind = job.output_type or "application/json"
        name = quote(message.id, safe="") + ("" if job.output_type else ".json")
        await self._aws.ask(
            lambda client: client.put_object(
                Bucket=self._bucket,
                Key=f"{self._prefix}/{name}" if self._prefix else name,
                Body=_output(job),
                ContentType=kind,
                Metadata=_facts(message, job),
            )
        )

    async def close(self) -> None:
        await self._aws.close()


def _facts(message: Message, job: Job) -> dict[str, str]:
    facts = {"job-id": job.id, "message-id": message.id, "function": job.function}
    if job.output_type:
        facts["content-type"] = job.output_type
    return facts


def _output(job: Job) -> bytes:
    return job.output or b"null"


def _is_text(job: Job) -> bool:
    return not job.output_type or job.output_type.startswith(TEXT)


def _text(job: Job) -> str:
    """The answer as a message may hold it."""
    output = _output(job)
    if _is_text(job):
        return output.decode("utf-8", "replace")
    return base64.b64encode(output).decode()
