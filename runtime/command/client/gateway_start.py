"""Lets commands wait for a gateway on this machine that is starting, as after `pilotflame serve &`.

A starting gateway announces its port: it listens on a unix socket whose name contains the port. The socket is in
Linux's abstract namespace, which needs no file and, like loopback, belongs to the network namespace. A command connects
to this socket and waits until the gateway closes it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

START_S = 10.0
"""The maximum wait of a command for a gateway that has announced its start."""
# The maximum wait of a command for an announcement. `serve &` makes it after half a second, or after several seconds on a
# busy machine.
ANNOUNCE_S = 5.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 0.25
CONNECT_S = 1.0


@contextlib.contextmanager
def announced_start(port: int) -> Iterator[Callable[[], None]]:
    """Announce that a gateway starts on `port`, until the block ends or the yielded function is called."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        # `bind` raises OSError if another gateway announces this port. Later, one of the two gateways cannot listen on
        # the port and reports that.
        with contextlib.suppress(OSError):
            sock.bind(_address(port))
            sock.listen()
        yield sock.close


def wait_for_start(port: int, timeout_s: float = START_S) -> bool:
    """If a gateway announces its start on `port`, wait until it listens or has ended, and return True."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(_address(port))
        except OSError:
            return False
        with contextlib.suppress(OSError):
            sock.recv(1)
        return True


def wait_for_gateway(host: str, port: int, on_wait: Callable[[], None]) -> None:
    """Wait until something listens on `port`. Give up after ANNOUNCE_S if no gateway announces its start.

    `host` is an address of this machine. Call `on_wait` when the wait begins. After the return, the caller should send
    its request again, which may still fail.
    """
    if _listens(host, port):
        return
    on_wait()
    give_up_s, pause_s = time.monotonic() + ANNOUNCE_S, FIRST_PAUSE_S
    while not wait_for_start(port) and not _listens(host, port) and time.monotonic() < give_up_s:
        # Poll, because there is no event for the announcement.
        threading.Event().wait(pause_s)
        pause_s = min(LAST_PAUSE_S, pause_s * 1.5)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def _address(port: int) -> str:
    return f"\0pilotflame/starting/{port}"
