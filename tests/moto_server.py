"""moto's S3 and SQS over HTTP. All servers of a process have the same content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer


@contextmanager
def moto_server() -> Iterator[str]:
    """Run a server, and yield its endpoint. Its content is removed at the end."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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
