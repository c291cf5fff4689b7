"""Defines the settings of a Kafka topic as an event source."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, Strict

from ...ground.settings.event_source import EventSource
from ...ground.settings.validation import checked, split_text

LEASE_S = 60.0
"""While messages are in progress, the consumer polls (`KafkaTopic.extend`) every third of this time. Otherwise it would leave
its group after MAX_POLL_S.
"""
_BROKER = re.compile(r"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}|\[[0-9a-fA-F:]{2,45}\]:[0-9]{1,5}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


def _brokers_problem(brokers: tuple[str, ...]) -> str | None:
    wrong = [broker for broker in brokers if not _BROKER.fullmatch(broker)]
    return f"source.brokers has {wrong[0]!r}; allowed: host:port" if wrong else None


def _topic_problem(topic: str | None) -> str | None:
    if topic is None or (_TOPIC.fullmatch(topic) and topic not in (".", "..")):
        return None
    return f"{topic!r} is no topic; allowed: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-'"


class KafkaSource(EventSource, frozen=True, extra="forbid", strict=True):
    """A topic of Kafka. Its messages are run as jobs, and `result` names the topic of the results."""

    opener: ClassVar = "pilotflame.runtime.plugins.kafka.topic:open_topic"
    package: ClassVar = "confluent_kafka"
    extra: ClassVar = "kafka"

    type: Literal["kafka"] = Field(description="The kind of message bus.")
    brokers: Annotated[
        tuple[str, ...], Strict(False), BeforeValidator(split_text), checked(_brokers_problem)
    ] = Field(min_length=1, max_length=32, description="Some of the cluster's brokers, as host:port.")
    topic: Annotated[str, checked(_topic_problem)] = Field(description="The topic.")
    group: str = Field(
        min_length=1, max_length=249, description="The consumer group. All its members share the messages."
    )
    begin: Literal["earliest", "latest"] = Field(
        "earliest", description="Where a group begins that has no offsets yet."
    )
    result: Annotated[str | None, checked(_topic_problem)] = Field(
        None, description="The topic to which results go, with the key of their message."
    )
    dead_letters: Annotated[str | None, checked(_topic_problem)] = Field(
        None,
        description="The topic to which a message goes whose job has failed max_deliveries times; by default it is tried for ever.",
    )
    max_deliveries: int = Field(
        5, ge=1, le=1000, description="How often a message is run before it is a dead letter."
    )
    tls: bool = Field(False, description="Whether connections to brokers are encrypted.")
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "PLAIN",
        description="How the function's secrets KAFKA_USERNAME and KAFKA_PASSWORD are sent, if it has them.",
    )

    @property
    def queue_name(self) -> str:
        return self.topic

    @property
    def address(self) -> str:
        return f"kafka://{','.join(self.brokers)}/{self.topic}"

    @property
    def scope(self) -> str:
        """The topic without the brokers, because a cluster's brokers may change. The ids of messages contain the cluster's id."""
        return self.topic

    @property
    def addresses(self) -> dict[str, str]:
        topics = {"topic": self.topic, "result": self.result, "dead_letters": self.dead_letters}
        brokers = ",".join(self.brokers)
        return {key: f"kafka://{brokers}/{topic}" for key, topic in topics.items() if topic is not None}

    @property
    def lease_s(self) -> float:
        return LEASE_S
