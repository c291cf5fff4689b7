"""Implements TLS as a client: loads the trusted authorities, and defines a stream that receives large pieces.

`ssl.SSLSocket` makes two system calls and a `poll` for each record of 16 KiB. TlsStream receives many records
at once and decrypts them from memory, which takes a fifth less processor time (docs/decisions.md). Most of that time is
decryption, which runs without the interpreter's lock, so a fetch needs no further processes. Ciphers cannot be chosen,
because Python 3.11 has no call for the ciphers of TLS 1.3.
"""

from __future__ import annotations

import ssl
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import cast

from .location import ServerAddress
from .socket_stream import SocketStream
from .source import new_buffer

RECEIVED_AT_ONCE = 1 << 20
GATHERED = 64 << 10
"""A receive of fewer bytes does not gather: the rest of a record would come in many small pieces."""


def system_trust(ca_bundle: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts the authorities of this machine, or only those in the file `ca_bundle`.

    All sources of this process share the context, because loading the authorities takes 40 ms. If the files of the
    authorities have changed, they are loaded again. Raise OSError if `ca_bundle` cannot be read.
    """
    paths = ssl.get_default_verify_paths()
    files = (ca_bundle,) if ca_bundle else (paths.cafile, paths.capath)
    return _loaded(ca_bundle, tuple(_stamp(file) for file in files))


@lru_cache(maxsize=4)
def _loaded(ca_bundle: str | None, stamps: tuple[object, ...]) -> ssl.SSLContext:
    # The stamps are only part of the cache's key. If a file changes, its stamp changes, and the file is loaded again.
    del stamps
    return ssl.create_default_context(cafile=ca_bundle)


def _stamp(path: str | None) -> tuple[object, ...]:
    try:
        found = Path(path).stat() if path else None
    except OSError:
        found = None
    return (path, found and (found.st_ino, found.st_size, found.st_mtime_ns))


class TlsStream:
    """TLS over a connected socket. Only one thread uses this object, and nothing else uses the SocketStream `raw`.

    Any thread may shut the socket down. Methods raise OSError, for example its subclass ssl.SSLError.
    """

    def __init__(self, raw: SocketStream, server: ServerAddress, trust: ssl.SSLContext) -> None:
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trust.wrap_bio(self._incoming, self._outgoing, server_hostname=server.host)
        self._buffer = new_buffer(RECEIVED_AT_ONCE)

    @property
    def idle(self) -> bool:
        """True if all bytes that were received have been read."""
        return not self._incoming.pending and not self._tls.pending()

    def handshake(self, deadline_s: float) -> None:
        """Agree on keys, and verify the server's certificate, before the monotonic time `deadline_s`."""
        try:
            while not self._shake_hands():
                self._flush()
                if not self._fill(timeout_s=max(1e-3, deadline_s - time.monotonic())):
                    raise ConnectionError("the connection was closed during the TLS handshake")
        except ssl.SSLError:
            # Send the TLS alert, which tells the server why, if it still listens.
            with suppress(OSError):
                self._flush()
            raise
        self._flush()

    def send(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def receive(self, view: memoryview, limit: int, *, gather: bool = False) -> int:
        """Wait for bytes, and decrypt at most `limit` into `view`. Return their number: 0 at the end of the stream.

        For `gather` see SocketStream.
        """
        done = 0
        while done < limit:
            try:
                # typeshed knows only the form without a buffer, which returns bytes.
                count = cast("int", self._tls.read(limit - done, cast("bytearray", view[done:])))
            except ssl.SSLWantReadError:
                if done:
                    break
                self._flush()
                if not self._fill(limit if gather else 0):
                    break
                continue
            if count == 0:
                break
            done += count
        return done

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._raw.send(self._outgoing.read())

    def _fill(self, gathered: int = 0, timeout_s: float | None = None) -> bool:
        """Wait for encrypted bytes. If `gathered` is at least GATHERED, gather that number of bytes. Return False at the end of the stream."""
        # At least `gathered` encrypted bytes will come, because encrypted data is longer than decrypted data.
        gather = gathered >= GATHERED
        wanted = min(gathered, RECEIVED_AT_ONCE) if gather else RECEIVED_AT_ONCE
        count = self._raw.receive(self._buffer, wanted, gather=gather, timeout_s=timeout_s)
        self._incoming.write(self._buffer[:count])
        return count > 0
