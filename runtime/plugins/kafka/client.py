"""Makes clients of Kafka (confluent-kafka), and turns their errors into BusFailed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ....errors import BusFailed, PackageMissing
from ....snapshot.extras import needs
from ...jobs.events.message_queue import Identity
from .settings import KafkaSource

LOG = logging.getLogger(__name__)
USERNAME, PASSWORD = "KAFKA_USERNAME", "KAFKA_PASSWORD"
REQUEST_S = 30.0
"""How long a request to a broker may take."""
_REMEDIES = {
    "UNKNOWN_TOPIC_OR_PART": "Create the topic, or check its name.",
    "_UNKNOWN_TOPIC": "Create the topic, or check its name.",
    "MSG_SIZE_TOO_LARGE": "Return less, or raise the topic's max.message.bytes.",
    "TOPIC_AUTHORIZATION_FAILED": "Let the user read and write the topics of the source.",
    "GROUP_AUTHORIZATION_FAILED": "Let the user use the consumer group.",
    "_AUTHENTICATION": f"Check the function's secrets {USERNAME} and {PASSWORD}, and the setting mechanism.",
    # Name both causes: a broker that needs a login closes connections without it, and a proxy whose broker is down closes
    # connections, too.
    "_ALL_BROKERS_DOWN": f"Check the brokers and the network, and the function's secrets {USERNAME} and {PASSWORD} if the brokers need a login.",
    "_TRANSPORT": "Check the brokers and the network.",
    "_RESOLVE": "Check the names of the brokers.",
}


def config_of(source: KafkaSource, identity: Identity) -> dict[str, Any]:
    """Return the settings of a client: the brokers, and the function's user.

    Raise BusFailed if the function is not trusted: the library connects to every address that a broker names, and the
    gateway cannot check these addresses.
    """
    if identity.access.own_only or identity.access.addresses is not None:
        fault = f"The topic {source.topic}: functions of keys that are not trusted may not use Kafka"
        raise BusFailed(f"{fault}.", remedy="Deploy it with a trusted key.", details={"code": "not_trusted"})
    secrets = identity.secrets()
    found: dict[str, Any] = {
        "bootstrap.servers": ",".join(source.brokers),
        "client.id": "pilotflame",
        "security.protocol": "ssl" if source.tls else "plaintext",
    }
    if username := secrets.get(USERNAME):
        found["security.protocol"] = "sasl_ssl" if source.tls else "sasl_plaintext"
        found |= {
            "sasl.mechanism": source.mechanism,
            "sasl.username": username,
            "sasl.password": secrets.get(PASSWORD, ""),
        }
    return found


@contextmanager
def failures(purpose: str) -> Iterator[Any]:
    """Yield the module confluent_kafka. Raise BusFailed, whose message begins with `purpose`, for its errors."""
    try:
        with needs("Kafka", "confluent_kafka"):
            kafka = import_module("confluent_kafka")
    except PackageMissing as error:
        raise BusFailed(error.message, remedy=error.remedy, details={"code": error.code}) from None
    try:
        yield kafka
    except kafka.KafkaException as error:
        raise failed(purpose, error.args[0]) from error
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        raise BusFailed(f"{purpose}: the client failed ({type(error).__name__}: {error}).") from error


def failed(purpose: str, error: Any) -> BusFailed:
    """Return the error for a KafkaError."""
    name = error.name()
    return BusFailed(
        f"{purpose}: {error.str()} ({name}).", remedy=_REMEDIES.get(name, ""), details={"code": name}
    )
