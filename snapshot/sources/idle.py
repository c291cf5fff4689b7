"""Keeps the idle network connections of one source for its next requests.

Each source has its own connections, so a connection is never used with the credentials of another source.
"""

from __future__ import annotations

import threading
import time

from .exchange import Exchange
from .location import ServerAddress
from .wire import Wire

MOST_IDLE = 8
"""How many connections are kept for one source."""
IDLE_S = 20.0
"""How long an idle connection is kept. Amazon's servers would close it a little later."""
DISTRUSTED_FOR_S = 600.0
"""How long no connections are kept after a server has answered a request twice. The server may be repaired by then."""


class IdleConnections:
    """The idle connections of one source. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[float, Wire, Exchange]] = []
        self._timer: threading.Timer | None = None
        self._trusted_from_s = 0.0

    def put(self, wire: Wire, exchange: Exchange) -> None:
        """Keep a connection. Close it instead if it cannot be used again, if enough connections are kept, or after `distrust`."""
        with self._lock:
            now_s = time.monotonic()
            room = now_s >= self._trusted_from_s and len(self._kept) < MOST_IDLE
            if room and exchange.clean and wire.quiet():
                self._kept.append((now_s + IDLE_S, wire, exchange))
                self._wake_later()
                return
        wire.close()

    def take(self, server: ServerAddress) -> tuple[Wire, Exchange] | None:
        """Return the connection to `server` that was used last. None if there is no connection to it.

        The connection is open and silent, but the server may close it before the next request.
        """
        with self._lock:
            for kept in reversed(self._kept):
                _, wire, exchange = kept
                if wire.origin != server:
                    continue
                self._kept.remove(kept)
                if wire.quiet():
                    return wire, exchange
                wire.close()
        return None

    def distrust(self) -> None:
        """Close all connections and keep none for a while. Call it if a server has answered a request twice."""
        with self._lock:
            self._trusted_from_s = time.monotonic() + DISTRUSTED_FOR_S
            self._close_until(float("inf"))
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wake_later(self) -> None:
        """Start a timer that closes the oldest connection after IDLE_S. The caller holds the lock."""
        if self._timer is None and self._kept:
            wait_s = max(0.0, self._kept[0][0] - time.monotonic())
            self._timer = threading.Timer(wait_s, self._close_old)
            self._timer.daemon = True
            self._timer.start()

    def _close_old(self) -> None:
        with self._lock:
            self._timer = None
            self._close_until(time.monotonic())
            self._wake_later()

    def _close_until(self, now_s: float) -> None:
        for _, wire, _ in (kept for kept in self._kept if kept[0] <= now_s):
            wire.close()
        self._kept = [kept for kept in self._kept if kept[0] > now_s]
