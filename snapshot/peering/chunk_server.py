"""Serves the chunks of a ServedChunks to other nodes, over HTTP/1.1, and over TLS if there is a certificate.

    GET /v1/line/KEY               this node's position in line for a snapshot, as JSON; ?settled=1 waits up to SETTLE_S for it
    GET /v1/chunks/KEY/TICKET/N    chunk N; 503 if it has not landed after a second, 404 if this node neither has nor fetches it

Every GET request needs the token of the cluster. Without the token, the answer is 401 for every path.
"""

from __future__ import annotations

import hmac
import mmap
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from socketserver import BaseServer
from types import MappingProxyType
from typing import Any, cast

import orjson

from ...errors import PilotflameError, SourceUnavailable
from .peer import LANDED_HEADER
from .served_chunks import LANDED, Lent, ServedChunks

MOST_CONNECTIONS = 512
IDLE_TIMEOUT_S = 30.0
HEAD_TIMEOUT_S = 5.0
"""How long a new connection may take to send a request with the token."""
MAX_HEAD_BYTES = 8 << 10
_BACKLOG = 128
_TLS_PIECE_BYTES = 1 << 20
_RETRY_S = 1.0
_MAX_DIGITS = 10


class ChunkServer:
    """Serves on `sock`, with a thread for each connection. `certificate` is the chain and the key, in PEM files.

    The thread of a connection calls `on_end` when the connection ends, if any chunk was served since it began.
    """

    def __init__(
        self,
        sock: socket.socket,
        served_chunks: ServedChunks,
        token: str,
        certificate: tuple[Path, Path] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.served_chunks = served_chunks
        self._on_end = on_end
        self._token, self._sock, self._certificate = f"Bearer {token}".encode(), sock, certificate
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self.served_bytes = 0
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._accept, name="chunk-server", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and end the open connections."""
        self._closed.set()
        with self._lock:
            for one in (self._sock, *self._open):
                # Only shut the socket down. This wakes the thread that waits for the socket, and that thread closes it.
                _shut(one)

    def admits(self, authorization: str) -> bool:
        """Return True if a request has the token. The comparison takes the same time for every wrong token."""
        return hmac.compare_digest(authorization.encode("utf-8", "replace"), self._token)

    def count(self, served_bytes: int) -> None:
        with self._lock:
            self.served_bytes += served_bytes

    def _accept(self) -> None:
        with self._sock:
            while not self._closed.is_set():
                try:
                    connection, _ = self._sock.accept()
                except OSError:
                    # `close` has shut the socket down, or this process has too many open files. If not closed, try again.
                    self._closed.wait(_RETRY_S)
                    continue
                if not self._slots.acquire(blocking=False):
                    connection.close()
                    continue
                try:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                except RuntimeError:
                    # The system starts no more threads, so refuse the connection.
                    self._slots.release()
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        before_bytes = self.served_bytes
        try:
            # Ignore an OSError: the peer has closed the connection, is silent, or does not use TLS.
            with suppress(OSError), connection:
                # This timeout is also the limit of the whole TLS handshake.
                connection.settimeout(HEAD_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._secured(connection) as secured, self._listed(secured):
                    _Handler(secured, (), cast("BaseServer", self))
        finally:
            self._slots.release()
            if self.served_bytes != before_bytes:
                self._on_end()

    @contextmanager
    def _listed(self, connection: socket.socket) -> Iterator[None]:
        """While the block runs, list a connection, so that `close` ends it. If `close` was called before, end it now."""
        with self._lock:
            self._open.add(connection)
            if self._closed.is_set():
                _shut(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def _secured(self, connection: socket.socket) -> socket.socket:
        if self._certificate is None:
            return connection
        # Read the files for each connection: a renewed certificate may replace them, and connections are few.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._certificate, password="")
        return context.wrap_socket(connection, server_side=True)


class _Heads:
    """Reads the lines of requests, and limits the size of a head. Without this limit, the standard library would read megabytes."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self.left_bytes = MAX_HEAD_BYTES

    def readline(self, limit: int) -> bytes:
        line = self._stream.readline(min(limit, self.left_bytes + 1))
        self.left_bytes -= len(line)
        if self.left_bytes < 0:
            raise ConnectionAbortedError("the head of the request is too long")
        return line

    def close(self) -> None:
        self._stream.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address of this machine. Raise OSError."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


class _Handler(BaseHTTPRequestHandler):
    """Serves the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "pilotflame"
    sys_version = ""
    connection: socket.socket

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("BufferedReader", _Heads(self.rfile))
        self._stranger = threading.Timer(HEAD_TIMEOUT_S, _shut, (self.connection,))
        self._stranger.daemon = True
        self._stranger.start()

    def finish(self) -> None:
        self._stranger.cancel()
        super().finish()

    def handle_one_request(self) -> None:
        cast("_Heads", self.rfile).left_bytes = MAX_HEAD_BYTES
        super().handle_one_request()

    def do_GET(self) -> None:
        served = cast("ChunkServer", self.server)
        if not served.admits(self.headers.get("Authorization", "")):
            self.close_connection = True
            self._say(401, {})
            return
        self._stranger.cancel()
        self.connection.settimeout(IDLE_TIMEOUT_S)
        path, _, query = self.path.partition("?")
        match path.split("/"):
            case ["", "v1", "line", key]:
                self._tell_position(served.served_chunks, key, settled=query == "settled=1")
            case ["", "v1", "chunks", key, ticket, chunk] if chunk.isdecimal() and len(chunk) < _MAX_DIGITS:
                self._send_chunk(served, key, ticket, int(chunk))
            case _:
                self._say(404, {})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it so
        """Log nothing: the node that sent a request reports its failure."""

    def _tell_position(self, served_chunks: ServedChunks, key: str, *, settled: bool) -> None:
        answer = served_chunks.position_of(key, settled=settled)
        position = answer.position
        self._say(
            200,
            {
                "node": answer.node,
                "number": position and position.number,
                "ticket": position and position.ticket,
                "choosing": answer.choosing,
            },
        )

    def _send_chunk(self, served: ChunkServer, key: str, ticket: str, chunk: int) -> None:
        try:
            with served.served_chunks.lent(key, ticket, chunk) as lent:
                self._begin(200, lent.size_bytes)
                self._send(lent)
                served.count(lent.size_bytes)
        except SourceUnavailable as error:
            landed = error.details.get(LANDED)
            self._say(
                404 if landed is None else 503, {}, {} if landed is None else {LANDED_HEADER: str(landed)}
            )
        except PilotflameError:
            self._say(404, {})

    def _send(self, lent: Lent) -> None:
        if isinstance(self.connection, ssl.SSLSocket):
            sent_bytes = self._send_secured(lent)
        else:
            with open(lent.descriptor, "rb", buffering=0, closefd=False) as stream:
                sent_bytes = self.connection.sendfile(stream, lent.offset, lent.size_bytes)
        # Close the connection after an incomplete chunk. Otherwise the peer would read the next answer as the rest of the
        # chunk.
        self.close_connection = self.close_connection or sent_bytes < lent.size_bytes

    def _send_secured(self, lent: Lent) -> int:
        at, end = lent.offset, lent.offset + lent.size_bytes
        with mmap.mmap(lent.descriptor, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            while at < min(end, len(view)):
                with view[at : min(at + _TLS_PIECE_BYTES, end)] as piece:
                    self.connection.sendall(piece)
                    at += len(piece)
        return at - lent.offset

    def _begin(self, status: int, size_bytes: int, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(size_bytes), **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _say(
        self, status: int, document: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        text = orjson.dumps(document)
        self._begin(status, len(text), headers)
        self.wfile.write(text)
