"""A small HTTP proxy: CONNECT for tunnels, and requests in absolute form. Only the proxy resolves its host names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit

_HEAD_BYTES = 64 << 10


class ProxyServer:
    """Listens on 127.0.0.1, a thread for each connection: `with ProxyServer({"weights.test": 8443}) as proxy`.

    `names` maps host names to ports of this machine. `answer` may return a response to send instead.
    `heads` are the heads of all requests, as the proxy received them.
    """

    def __init__(
        self, names: Mapping[str, int], answer: Callable[[str], bytes | None] = lambda _: None
    ) -> None:
        self.names = names
        self.answer = answer
        self.heads: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> ProxyServer:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in [self._listener, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        self._listener.close()

    def _start(self, work: Callable[..., None], *given: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=given, name="proxy")
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer = self._listener.accept()[0]
                self._open.add(peer)
                self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
                piece = peer.recv(_HEAD_BYTES)
                if not piece:
                    return
                head += piece
            text = head.decode("latin-1")
            self.heads.append(text)
            if (instead := self.answer(text)) is not None:
                peer.sendall(instead)
                return
            self._pass_on(peer, text)

    def _pass_on(self, peer: socket.socket, head: str) -> None:
        method, target, _ = head.partition("\r\n")[0].split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        port = self.names[parts.hostname or ""]
        with socket.create_connection(("127.0.0.1", port), 10) as there:
            self._open.add(there)
            if method == "CONNECT":
                peer.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                lines = [line for line in head.split("\r\n") if not line.lower().startswith("proxy-")]
                path = f"{parts.path}{f'?{parts.query}' if parts.query else ''}"
                there.sendall("\r\n".join([f"{method} {path} HTTP/1.1", *lines[1:]]).encode("latin-1"))
            up = self._start(_pump, peer, there)
            _pump(there, peer)
            up.join(20)


def _pump(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
