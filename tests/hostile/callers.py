"""Hostile callers, their archives, and a server to which a gateway must not be led."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import io
import json
import os
import socket
import socketserver
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

BATCH = "application/cloudevents-batch+json"
LAMBDA = "/lambda/2015-03-31/functions/hello/invocations"


def senders(count: int) -> ThreadPoolExecutor:
    """Return threads of the attacker, who has a machine of their own: the gateway's processes have the processor first."""
    return ThreadPoolExecutor(count, initializer=lambda: os.setpriority(os.PRIO_PROCESS, 0, 19))


def post(url: str, path: str, key: str, body: Any = None, kind: str = "application/json") -> int:
    """Send a request, and return the status."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
        connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse().status


def submit_large(url: str, path: str, key: str, count: int) -> int:
    """Submit jobs of 10 MiB. Return the number of accepted jobs."""
    body = {"input": "x" * ((10 << 20) - 64)}
    with senders(4) as pool:
        return sum(pool.map(lambda _: post(url, path, key, body) == 200, range(count)))


def submit_many(url: str, path: str, key: str, count: int) -> int:
    """Submit jobs in batches of 1,000. Return the number of accepted jobs."""
    event, accepted = {"specversion": "1.0", "source": "/evil", "type": "evil", "data": 1}, 0
    for first in range(0, count, 1000):
        batch = [{**event, "id": str(number)} for number in range(first, min(first + 1000, count))]
        accepted += len(batch) * (post(url, path, key, batch, BATCH) == 202)
    return accepted


def read_nothing(url: str, path: str, key: str, seconds: float) -> None:
    """Call a function that streams, and leave without having read."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
        connection.request("POST", path, json.dumps({"s": seconds}), headers)
        time.sleep(seconds)


def signed_call(url: str, key: str, size: int) -> tuple[int, float]:
    """Send a call with a right signature. Return its status, and the seconds that it took."""
    begun_s, (_, key_id, secret) = time.monotonic(), key.split("_")
    request = AWSRequest("POST", url + LAMBDA, data=json.dumps("x" * size))
    SigV4Auth(Credentials(key_id, secret), "lambda", "us-east-1").add_auth(request)
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", LAMBDA, request.body, dict(request.headers))
        return connection.getresponse().status, time.monotonic() - begun_s


def packed(members: Mapping[str, str]) -> bytes:
    """Return a tar.gz, whose names may be hostile. A member whose text begins with "-> " is a symbolic link."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as tar:
        for name, text in members.items():
            member, content = tarfile.TarInfo(name), text.encode()
            if text.startswith("-> "):
                member.type, member.linkname, content = tarfile.SYMTYPE, text[3:], b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return found.getvalue()


def fail(url: str, path: str, key: str, size: int, count: int) -> set[int]:
    """Send calls with large inputs, all of which fail, and return their statuses."""
    large = "x" * size
    body: dict[str, Any] = {"instances": [large]} if path.endswith(":predict") else {"input": large}
    with senders(8) as pool:
        return set(pool.map(lambda _: post(url, path, key, body), range(count)))


@contextmanager
def deaf_receivers(count: int, host: str = "127.0.0.2") -> Iterator[list[str]]:
    """Yield the URLs of servers that take connections and never answer."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        yield [f"http://{host}:{sock.getsockname()[1]}/deaf" for sock in socks]


@contextmanager
def unfinished_bodies(url: str, key_id: str, count: int) -> Iterator[None]:
    """Keep requests open during the block: 9 of 10 MiB of their bodies are sent, and their signatures are bogus."""
    parts, day = urlsplit(url), datetime.datetime.now(datetime.UTC)
    scope = f"Credential={key_id}/{day:%Y%m%d}/us-east-1/lambda/aws4_request"
    head = (
        f"POST {LAMBDA} HTTP/1.1\r\nHost: {parts.netloc}\r\nX-Amz-Date: {day:%Y%m%dT%H%M%SZ}\r\nContent-Length: {10 << 20}\r\n"
        f"Authorization: AWS4-HMAC-SHA256 {scope}, SignedHeaders=host;x-amz-date, Signature={'0' * 64}\r\n\r\n"
    )
    with contextlib.ExitStack() as held:
        for _ in range(count):
            sock = held.enter_context(socket.create_connection((parts.hostname or "", parts.port or 80)))
            sock.settimeout(0.02)
            # The gateway does not read the bodies that it has no place for.
            with contextlib.suppress(TimeoutError):
                sock.sendall(head.encode() + bytes(9 << 20))
        yield


@contextmanager
def trap(host: str = "127.0.0.1", location: str = "") -> Iterator[tuple[str, list[str]]]:
    """Serve HTTP during the block: 404, or a redirect to `location`. Yield the URL, and a list of the requests."""
    hits: list[str] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if text := self.request.recv(1 << 16).decode("latin-1"):
                hits.append(text.partition(" HTTP")[0])
                where = (
                    f"307 Moved\r\nLocation: {location}{hits[-1].partition(' ')[2]}" if location else "404 No"
                )
                self.request.sendall(
                    f"HTTP/1.1 {where}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
                )
                self.request.recv(1 << 16)

    with socketserver.ThreadingTCPServer((host, 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{host}:{server.server_address[1]}", hits
        server.shutdown()
