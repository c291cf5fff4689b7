"""Messages of Kafka that wait to be run."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.runtime.jobs.events.message_queue import Message
from pilotflame.runtime.plugins.kafka import deliveries as module
from pilotflame.runtime.plugins.kafka.deliveries import Deliveries


class Raw:
    """A message of the consumer, as confluent_kafka returns it."""

    def __init__(
        self,
        headers: list[tuple[str, bytes | None]] | None = None,
        offset: int = 7,
        key: bytes | None = b"key",
    ) -> None:
        self._headers, self._offset, self._key = headers, offset, key

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

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


def received(*keys: bytes | None) -> Deliveries:
    """Return deliveries with a message of each key, at the offsets from 0 on."""
    deliveries = Deliveries()
    deliveries.assign([0])
    for offset, key in enumerate(keys):
        deliveries.add(Raw(offset=offset, key=key))
    return deliveries


def offsets(found: list[Message]) -> list[int]:
    return [one.facts["offset"] for one in found]


def test_a_message_waits_for_the_earlier_ones_of_its_key() -> None:
    deliveries = received(b"a", b"a", b"b", None, None)
    first = deliveries.take(10)
    assert offsets(first) == [0, 2, 3, 4]
    assert (deliveries.waiting, deliveries.take(10)) == (1, [])
    assert deliveries.finish(first[0])
    assert offsets(deliveries.take(10)) == [1]
    assert offsets(received(b"a", b"b").take(1)) == [0]


def test_the_offset_of_the_first_unfinished_message_is_committed_once() -> None:
    deliveries = received(None, None, None)
    first, second, third = deliveries.take(10)
    deliveries.finish(second)
    assert deliveries.uncommitted() == {0: 0}
    deliveries.note_committed({0: 0, 5: 9})
    assert deliveries.uncommitted() == {}
    deliveries.finish(first)
    deliveries.finish(third)
    assert deliveries.uncommitted() == {0: 3}


def test_only_a_failure_counts_as_a_delivery() -> None:
    deliveries = received(b"a")
    for failed, received_before in ((False, 1), (True, 1), (False, 2)):
        (message,) = deliveries.take(1)
        assert message.received == received_before
        deliveries.again(message, 0.0, failed=failed)
    (message,) = deliveries.take(1)
    deliveries.again(message, 60.0, failed=True)
    assert deliveries.take(1) == []
    assert 0 < deliveries.poll_s(5.0) <= 5.0
    assert 50 < deliveries.poll_s(100.0) <= 60.0


def test_messages_of_a_partition_that_another_member_gets_are_forgotten() -> None:
    deliveries = received(b"a", b"a")
    (message,) = deliveries.take(1)
    deliveries.revoke([0])
    assert (deliveries.waiting, deliveries.record_of(message), deliveries.finish(message)) == (0, None, False)
    deliveries.add(Raw())
    assert deliveries.waiting == 0
    deliveries.assign([0])
    deliveries.add(Raw())
    # The same offset in a new assignment is another delivery.
    (again,) = deliveries.take(1)
    assert not deliveries.finish(message)
    assert deliveries.finish(again)


def test_a_partition_is_paused_while_much_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    deliveries = received(b"a", b"b")
    assert deliveries.paused() == set()
    monkeypatch.setattr(module, "MAX_SPAN", 2)
    assert deliveries.paused() == {0}
    monkeypatch.setattr(module, "MAX_SPAN", 3)
    # The messages have no value, so each body is `null`, which has four bytes.
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 8)
    assert deliveries.paused() == {0}
    deliveries.take(1)
    assert deliveries.paused() == set()
