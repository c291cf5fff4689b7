"""Fixtures for tests of event sources: moto over HTTP, access to its queues, and credentials."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.sqs.models import sqs_backends
from moto_server import moto_server

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Yield the endpoint of moto. The environment has credentials for moto and no other AWS settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.upper().startswith(("AWS_", "BOTO_"))]:
            patch.delenv(name)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLEEXAMPLE00")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hush/secret+key")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with moto_server() as endpoint:
            yield endpoint


class Queue:
    """A queue in moto, as its sender sees it, with moto's internal state."""

    def __init__(self, client: Any, name: str, **attributes: str) -> None:
        self._client = client
        self.name = name
        self.url = client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]

    @property
    def arn(self) -> str:
        got = self._client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])
        return str(got["Attributes"]["QueueArn"])

    async def send(self, body: str, **more: Any) -> str:
        sent = await asyncio.to_thread(self._client.send_message, QueueUrl=self.url, MessageBody=body, **more)
        return str(sent["MessageId"])

    async def take(self) -> list[dict[str, Any]]:
        """Receive the visible messages."""
        got = await asyncio.to_thread(
            self._client.receive_message, QueueUrl=self.url, MaxNumberOfMessages=10,
            MessageAttributeNames=["All"], WaitTimeSeconds=0,
        )  # fmt: skip
        return list(got.get("Messages", ()))

    @property
    def messages(self) -> list[Any]:
        """All messages, visible or not."""
        return list(sqs_backends["123456789012"]["us-east-1"].queues[self.name]._messages)

    @property
    def bodies(self) -> list[str]:
        return sorted(message.body for message in self.messages)

    async def empty(self) -> bool:
        return not self.messages


@pytest.fixture(scope="module")
def sqs(moto: str) -> Iterator[Any]:
    client = boto3.client("sqs", endpoint_url=moto)
    yield client
    client.close()


@pytest.fixture
def queue(sqs: Any) -> Callable[..., Queue]:
    """Return a function: `queue(RedrivePolicy=…)` creates a queue."""

    def make(**attributes: str) -> Queue:
        suffix = ".fifo" if "FifoQueue" in attributes else ""
        return Queue(sqs, f"queue-{next(_numbers)}{suffix}", **attributes)

    return make
