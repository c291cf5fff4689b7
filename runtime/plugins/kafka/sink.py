"""Sends the outputs of jobs, and messages that failed too often, to topics."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ....errors import BusFailed, OutputRefused
from ...jobs.events.blocking_calls import call_in_thread
from ...jobs.events.message_queue import Identity, Message
from ...jobs.stored.job import Job
from .client import LOG, REQUEST_S, config_of, failed, failures
from .settings import KafkaSource

MARGIN_S = 5.0
"""`Writer` waits for the outcome of a write this much longer than the producer tries to write (REQUEST_S)."""

MAX_MESSAGE_BYTES = 100_000_000
"""The limit of the producer. It is so high that only brokers and topics limit messages. By default, the library's consumers
receive no larger messages, either.
"""
UNKNOWN_TOPIC_S = 10.0
"""After this time, the producer reports a missing topic. The time is shorter than REQUEST_S, so that the error is not the
same as for brokers that are down.
"""
MISSING = frozenset({"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"})
_FINAL = frozenset({
    "MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE", "INVALID_MSG_SIZE", "INVALID_RECORD", "TOPIC_EXCEPTION",
}) | MISSING  # fmt: skip
"""The errors that each further try would raise, too. `KafkaTopic` tries again after MISSING, because the topic of dead
letters may still be created.
"""


class Writer:
    """Writes messages, and waits until all in-sync replicas have them. The first write creates the producer."""

    def __init__(self, source: KafkaSource, identity: Identity) -> None:
        self._source, self._identity = source, identity
        self._opening = threading.Lock()
        self._producer: Any = None

    def write(
        self, topic: str, key: bytes | None, body: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        """Write a message. Blocks. Raise BusFailed if it was not stored; OutputRefused if the topic can never take it."""
        try:
            self._write(topic, key, body, headers)
        except BusFailed as error:
            if error.details.get("code") not in _FINAL:
                raise
            size = f"{error.message} The message has {len(body or b'')} bytes."
            raise OutputRefused(size, remedy=error.remedy, details=error.details) from error

    def _write(
        self, topic: str, key: bytes | None, body: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        purpose, stored = f"The topic {topic}", threading.Event()
        outcome: list[Any] = []

        def told(error: Any, _message: Any) -> None:
            outcome.append(error)
            stored.set()

        with failures(purpose) as kafka:
            with self._opening:
                if self._producer is None:
                    config = config_of(self._source, self._identity) | {
                        "acks": "all",
                        "enable.idempotence": True,
                        "message.timeout.ms": int(REQUEST_S * 1000),
                        "message.max.bytes": MAX_MESSAGE_BYTES,
                        "topic.metadata.propagation.max.ms": int(UNKNOWN_TOPIC_S * 1000),
                    }
                    self._producer = kafka.Producer(config, logger=LOG)
            self._producer.produce(topic, key=key, value=body, headers=list(headers), on_delivery=told)
            self._producer.flush(REQUEST_S + MARGIN_S)
            # `flush` of another thread may have taken this message's callback, but not have run it yet.
            if not stored.wait(MARGIN_S):
                raise BusFailed(f"{purpose}: the message was not stored in time.")
            if outcome[0] is not None:
                raise failed(purpose, outcome[0])


class TopicSink:
    """A sink that writes each output with the key of its message. If an output is sent twice,
    the topic has two messages.
    """

    def __init__(self, topic: str, writer: Writer) -> None:
        self._topic, self._writer = topic, writer

    async def put(self, message: Message, job: Job) -> None:
        key = message.group.partition(":")[2]
        facts = {"job-id": job.id, "message-id": message.id, "function": job.function}
        if job.output_type:
            facts["content-type"] = job.output_type
        headers = [(name, text.encode()) for name, text in facts.items()]
        body = job.output or b"null"
        await call_in_thread(
            lambda: self._writer.write(
                self._topic, bytes.fromhex(key) if message.group else None, body, headers
            )
        )

    async def check(self) -> None:
        """Do nothing: brokers may make a topic when the first message is written."""

    async def close(self) -> None:
        """Do nothing: each write has ended when it returns."""
