"""Messages of Kafka that wait to be run."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.runtime.jobs.events.message_queue import Message
from pilotflame.runtime.plugins.kafka.deliveries import Deliveries


class Raw:
    """A message of the consumer, as confluent_kafka returns it."""

    def __init__(self, headers: list[tuple[str, bytes | None]] | None) -> None:
        self._headers = headers

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def key(self) -> bytes:
        return b"key"

    def value(self) -> bytes | None:
        return None

    def headers(self) -> Any:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000


def taken(deliveries: Deliveries) -> Message:
    deliveries.assign({0: 7})
    deliveries.add(Raw([("trace", b"1"), ("nothing", None)]))
    (message,) = deliveries.take(10)
    return message


@pytest.mark.parametrize(("dialect", "whole"), [("", True), ("lambda", True), ("pilotflame", False)])
def test_only_a_handler_of_lambda_gets_what_repeats_the_input(dialect: str, whole: bool) -> None:
    found = taken(Deliveries(dialect=lambda: dialect)).facts
    assert (found["partition"], found["offset"], found["key"]) == (0, 7, "a2V5")
    assert ("value" in found, "headers" in found) == (whole, whole)


def test_a_header_without_a_value_is_an_empty_one() -> None:
    deliveries = Deliveries()
    message = taken(deliveries)
    assert (message.attributes, message.body) == ({"trace": "1", "nothing": ""}, b"null")
    assert deliveries.finish(message)
