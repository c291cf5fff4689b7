"""moto keeps the order of a FIFO queue's message groups, because tests of event sources rely on it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from moto_server import moto_server


@pytest.fixture
def queue() -> Iterator[tuple[Any, str]]:
    """A client, and the URL of a FIFO queue whose messages are in flight for a second."""
    with moto_server() as endpoint:
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        client = boto3.client("sqs", endpoint_url=endpoint, region_name="us-east-1", **keys)
        attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true", "VisibilityTimeout": "1"}
        yield client, client.create_queue(QueueName="orders.fifo", Attributes=attributes)["QueueUrl"]
        client.close()


def send(queue: tuple[Any, str], *bodies: str) -> None:
    for body in bodies:
        queue[0].send_message(QueueUrl=queue[1], MessageBody=body, MessageGroupId="key")


def receive(queue: tuple[Any, str], most: int, wait_s: int) -> list[str]:
    found = queue[0].receive_message(QueueUrl=queue[1], MaxNumberOfMessages=most, WaitTimeSeconds=wait_s)
    return [one["Body"] for one in found.get("Messages", ())]


def test_messages_that_are_visible_again_keep_their_order(queue: tuple[Any, str]) -> None:
    send(queue, "1", "2", "3")
    assert receive(queue, 2, 0) == ["1", "2"]
    assert receive(queue, 2, 0) == []
    assert receive(queue, 3, 5) == ["1", "2", "3"]


def test_a_long_poll_leaves_a_group_alone_that_another_poll_has(queue: tuple[Any, str]) -> None:
    with ThreadPoolExecutor() as polls:
        one, two = [polls.submit(receive, queue, 1, 1) for _ in range(2)]
        send(queue, "1", "2")
        assert sorted([one.result(), two.result()]) in ([[], ["1"]], [["1"], ["1"]])
