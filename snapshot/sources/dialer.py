"""Connects sockets to hosts that may have several addresses, some of which do not answer.

The addresses of a host are tried as in RFC 8305 ("happy eyeballs"): if an address does not answer within a quarter of a
second, the next address is tried too. The first address that answers is used. Each connection to a host begins with
another address, so that the connections are spread over all addresses: each address of a bucket is a server with its own
limit.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Protocol

from ...addresses import Addresses

ATTEMPT_DELAY_S = 0.25
RESOLVED_FOR_S = 10.0
AVOIDED_FOR_S = 60.0
_MAX_REMEMBERED = 256


class Address(NamedTuple):
    """The family of an address, such as AF_INET6, and the address in the form that `socket` uses."""

    family: int
    name: tuple[Any, ...]


class AddressRefused(PermissionError):
    """No address of a host may be connected to. `reason` says why, without the address."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, f"its address may not be connected to: {reason}")
        self.reason = reason


class Sockets(Protocol):
    """Owns the sockets that are being connected. Another thread may shut them down."""

    def opened(self, one: socket.socket) -> None:
        """Take over a new socket. Raise OSError if no more sockets may be opened."""

    def discard(self, one: socket.socket) -> None:
        """Close a socket."""


class _Unshared:
    """The Sockets of one attempt to connect. No other thread shuts these sockets down."""

    def opened(self, one: socket.socket) -> None: ...

    def discard(self, one: socket.socket) -> None:
        one.close()


class Dialer:
    """Remembers the addresses of hosts, and the addresses that did not answer. Thread-safe."""

    def __init__(self, allowed: Addresses | None = None) -> None:
        """Connect only to `allowed` addresses, or to all addresses if `allowed` is None."""
        self._allowed = allowed
        self._lock = threading.Lock()
        # The look-ups by host and port. All threads that need the addresses of a host wait for the same look-up.
        self._lookups: dict[tuple[str, int], _Lookup] = {}
        self._avoided: dict[Address, float] = {}
        self._turn = 0

    def connect(self, host: str, port: int, deadline_s: float, sockets: Sockets) -> socket.socket:
        """Return a non-blocking socket that is connected to `host`. Raise OSError."""
        race = _Race(self.addresses(host, port, deadline_s), deadline_s, sockets)
        try:
            return race.run()
        finally:
            for address in race.lost:
                self.avoid(address)

    def dial(self, host: str, port: int, connect_s: float, timeout_s: float | None) -> socket.socket:
        """Return a blocking socket with the time limit `timeout_s`, for a client library. Raise OSError or AddressRefused."""
        found = self.connect(host, port, time.monotonic() + connect_s, _Unshared())
        found.settimeout(timeout_s)
        return found

    def addresses(self, host: str, port: int, deadline_s: float) -> list[Address]:
        """Return the addresses of `host` in the order in which to try them. Each call begins with another address.

        Avoided addresses come last. Raise OSError if no address is known by the monotonic time `deadline_s`, and its
        subclass AddressRefused if no address may be connected to.
        """
        known, now_s = self._checked(self._lookup(host, port).addresses(deadline_s)), time.monotonic()
        with self._lock:
            turn, self._turn = self._turn, self._turn + 1
            # `sorted` keeps the order of equal elements.
            return sorted(interleaved(known, turn), key=lambda each: self._avoided.get(each, 0.0) > now_s)

    def avoid(self, address: Address) -> None:
        """Try other addresses before this one for a while."""
        with self._lock:
            if len(self._avoided) >= _MAX_REMEMBERED:
                self._avoided.clear()
            self._avoided[address] = time.monotonic() + AVOIDED_FOR_S

    def _checked(self, known: list[Address]) -> list[Address]:
        """Return the addresses that may be connected to. Raise AddressRefused if there are none."""
        if self._allowed is None:
            return known
        faults = {address: self._allowed.fault(str(address.name[0])) for address in known}
        found = [address for address, fault in faults.items() if fault is None]
        if known and not found:
            raise AddressRefused(str(faults[known[0]]))
        return found

    def _lookup(self, host: str, port: int) -> _Lookup:
        with self._lock:
            lookup = self._lookups.get((host, port))
            if lookup is None or not lookup.counts():
                if len(self._lookups) >= _MAX_REMEMBERED:
                    self._lookups.clear()
                lookup = self._lookups[host, port] = _Lookup(host, port)
                lookup.start()
        return lookup


class _Lookup(threading.Thread):
    """Asks the system for the addresses of a host, in a thread, because the system may take a minute or hang."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name=f"look-up {host}", daemon=True)
        self._host, self._port = host, port
        self._known: list[Address] = []
        self._failure: OSError | None = None
        self._until_s = 0.0

    def run(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._failure = error
        except UnicodeError:
            self._failure = socket.gaierror(socket.EAI_NONAME, f"{self._host[:80]!r} is no name of a host")
        else:
            self._known = list(dict.fromkeys(Address(family, name) for family, _, _, _, name in found))
            self._until_s = time.monotonic() + RESOLVED_FOR_S

    def counts(self) -> bool:
        """Return True if the look-up still runs, or has found addresses that are not too old."""
        return self.is_alive() or time.monotonic() < self._until_s

    def addresses(self, deadline_s: float) -> list[Address]:
        """Wait for the addresses and return them. Raise OSError."""
        self.join(max(0.0, deadline_s - time.monotonic()))
        if self.is_alive():
            raise socket.gaierror(socket.EAI_AGAIN, f"the address of {self._host} was not found in time")
        if self._failure is not None:
            raise self._failure
        return self._known


def interleaved(addresses: Iterable[Address], turn: int) -> list[Address]:
    """Rotate the addresses of each family by `turn`. Alternate the families, beginning with the family of the first address."""
    families: dict[int, list[Address]] = {}
    for address in addresses:
        families.setdefault(address.family, []).append(address)
    rotated = [row[turn % len(row) :] + row[: turn % len(row)] for row in families.values()]
    return [address for address in chain.from_iterable(zip_longest(*rotated)) if address is not None]


class _Race:
    """Connects to the address that answers first. `lost` has the addresses that failed or were too slow."""

    def __init__(self, addresses: list[Address], deadline_s: float, sockets: Sockets) -> None:
        self.lost: list[Address] = []
        self._waiting = addresses
        self._deadline_s = deadline_s
        self._sockets = sockets
        self._trying: dict[int, tuple[socket.socket, Address]] = {}
        self._next_s = 0.0
        self._poll = select.poll()
        self._failure: OSError = TimeoutError("timed out")

    def run(self) -> socket.socket:
        try:
            while True:
                now_s = time.monotonic()
                if self._waiting and (not self._trying or now_s >= self._next_s):
                    self._next_s = now_s + ATTEMPT_DELAY_S
                    self._start(self._waiting.pop(0))
                elif not self._trying or now_s >= self._deadline_s:
                    raise self._failure
                elif (winner := self._wait(now_s)) is not None:
                    return winner
        finally:
            for one, address in self._trying.values():
                self.lost.append(address)
                self._sockets.discard(one)

    def _start(self, address: Address) -> None:
        try:
            one = socket.socket(address.family, socket.SOCK_STREAM)
        except OSError as error:
            # Try the next address. A kernel without IPv6 has no sockets for the IPv6 addresses of a host.
            self._lost(address, error)
            return
        self._sockets.opened(one)
        one.setblocking(False)
        code = one.connect_ex(address.name)
        if code in (0, errno.EINPROGRESS):
            self._trying[one.fileno()] = (one, address)
            self._poll.register(one, select.POLLOUT)
        else:
            self._lose(one, address, code)

    def _wait(self, now_s: float) -> socket.socket | None:
        """Wait until an attempt ends or the next attempt is due. Return the connected socket, if there is one."""
        until_s = min(self._deadline_s, self._next_s) if self._waiting else self._deadline_s
        for descriptor, events in self._poll.poll(max(0.0, until_s - now_s) * 1000 + 1):
            one, address = self._trying[descriptor]
            code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            # POLLHUP without an error means that another thread has shut the socket down.
            if not code and not events & select.POLLHUP:
                self._win(descriptor)
                return one
            del self._trying[descriptor]
            self._poll.unregister(descriptor)
            self._lose(one, address, code)
        return None

    def _win(self, winner: int) -> None:
        """End the attempts that began after the winner, without counting them as lost. The earlier attempts are lost."""
        began = list(self._trying)
        del self._trying[winner]
        for descriptor in began[began.index(winner) + 1 :]:
            one, _ = self._trying.pop(descriptor)
            self._sockets.discard(one)

    def _lose(self, one: socket.socket, address: Address, code: int) -> None:
        self._sockets.discard(one)
        self._lost(address, OSError(code, os.strerror(code)) if code else ConnectionAbortedError("closed"))

    def _lost(self, address: Address, failure: OSError) -> None:
        self.lost.append(address)
        self._failure, self._next_s = failure, 0.0
