"""A mock cluster of Kafka, which librdkafka brings, and clients for tests."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, Message, Producer, TopicPartition

LIMIT_S = 30.0


class Cluster:
    """Brokers in this process. Any client can connect to `brokers`."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        found = producer.list_topics(timeout=LIMIT_S).brokers.values()
        self.brokers = [f"{one.host}:{one.port}" for one in found]

    def write(
        self,
        topic: str,
        bodies: Sequence[bytes | str | None],
        keys: Sequence[str | None] = (),
        partition: int = -1,
    ) -> None:
        """Write messages, with these keys in turn. Without a partition, the key chooses it."""
        for number, body in enumerate(bodies):
            key = keys[number % len(keys)] if keys else None
            self.producer.produce(topic, key=key, value=body, partition=partition)
        assert self.producer.flush(LIMIT_S) == 0

    @contextmanager
    def reader(self, topic: str) -> Iterator[Any]:
        """Open a consumer that begins with the first message of a topic."""
        client = Consumer({
            "bootstrap.servers": ",".join(self.brokers), "group.id": f"reader-{time.monotonic_ns()}",
            "auto.offset.reset": "earliest", "enable.auto.commit": False,
        })  # fmt: skip
        client.subscribe([topic])
        try:
            yield client
        finally:
            client.close()

    def read(self, topic: str, count: int) -> list[Message]:
        """Return the first messages of a topic, as soon as there are `count`."""
        found: list[Message] = []
        until_s = time.monotonic() + LIMIT_S
        with self.reader(topic) as client:
            while len(found) < count and time.monotonic() < until_s:
                found += [one for one in client.consume(count - len(found), 0.2) if one.error() is None]
        assert len(found) == count, (topic, len(found))
        return found

    def committed(self, topic: str, group: str) -> dict[int, int]:
        """Return the committed offset of each partition that has one."""
        client = Consumer({"bootstrap.servers": ",".join(self.brokers), "group.id": group})
        parts = self.producer.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions
        found = client.committed([TopicPartition(topic, one) for one in parts], timeout=LIMIT_S)
        client.close()
        return {one.partition: one.offset for one in found if one.offset >= 0}


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Run a mock cluster with one broker."""
    producer = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    yield Cluster(producer)
    producer.flush(LIMIT_S)


class _SaslListener(socketserver.BaseRequestHandler):
    """A connection to a broker that refuses each password, and ends a connection that asks before it logs in."""

    VERSIONS = ((3, 0, 4), (17, 0, 1), (18, 0, 0), (36, 0, 0))

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, struct.error):
            while True:
                (size,) = struct.unpack(">i", self._read(4))
                key, version, correlation = struct.unpack(">hhi", self._read(size)[:8])
                if (answer := self._answer(key, version)) is None:
                    return
                self.request.sendall(struct.pack(">ii", len(answer) + 4, correlation) + answer)

    def _answer(self, key: int, version: int) -> bytes | None:
        if key == 18:
            rows = b"".join(struct.pack(">hhh", *one) for one in self.VERSIONS)
            return struct.pack(">hi", 35 if version else 0, len(self.VERSIONS)) + rows
        if key == 17:
            return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
        text = b"Authentication failed: Invalid username or password"
        return struct.pack(">hh", 58, len(text)) + text + struct.pack(">i", 0) if key == 36 else None

    def _read(self, size: int) -> bytes:
        data: bytes = self.request.recv(size, socket.MSG_WAITALL)
        return data


class _DeadEnd(socketserver.BaseRequestHandler):
    """A connection that is closed at once, as by a proxy whose broker is down."""


@contextmanager
def sasl_broker() -> Iterator[str]:
    """Run a broker that refuses each login. Yield its address."""
    with _listening(_SaslListener) as address:
        yield address


@contextmanager
def dead_end() -> Iterator[str]:
    """Run a proxy whose broker is down. Yield its address."""
    with _listening(_DeadEnd) as address:
        yield address


@contextmanager
def _listening(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
