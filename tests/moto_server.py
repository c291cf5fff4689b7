"""moto's S3 and SQS over HTTP. All servers of a process have the same content."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer
from moto.sqs.models import Message, SQSBackend

LOOK_AGAIN_S = 0.2


@contextmanager
def moto_server() -> Iterator[str]:
    """Run a server, and yield its endpoint. Its content is removed at the end."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with mock.patch.object(SQSBackend, "receive_message", receive_in_order):
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        try:
            yield endpoint
            reset(endpoint)
        finally:
            server.stop()


def reset(endpoint: str) -> None:
    """Remove all content."""
    urlopen(Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=10).close()


_RECEIVE = SQSBackend.receive_message
_RECEIVING = threading.Lock()


def receive_in_order(
    backend: SQSBackend, queue_name: str, count: int, wait_seconds_timeout: int, *more: Any, **named: Any
) -> list[Message]:
    """Receive messages as `SQSBackend.receive_message` does, and keep the order of each message group, as AWS does.

    moto's own function breaks the order twice. A long poll decides at its begin which groups have messages in flight. If the
    messages of a group become visible again, it first returns the last one.
    """
    end_s = time.monotonic() + wait_seconds_timeout
    queue = backend.get_queue(queue_name)
    while True:
        with _RECEIVING:
            queue.pending_messages.difference_update([one for one in queue.pending_messages if one.visible])
            found = _RECEIVE(backend, queue_name, count, 0, *more, **named)
        left_s = end_s - time.monotonic()
        if found or left_s <= 0:
            return found
        with queue._messages_lock:
            queue._messages_lock.wait(min(left_s, LOOK_AGAIN_S))
