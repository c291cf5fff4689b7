"""Lets commands wait for a gateway on this machine that is starting, as after `pilotflame serve &`.

A gateway that starts announces its port: it listens on a unix socket in Linux's abstract namespace, which needs no
file and, like loopback, belongs to the network namespace. A command connects to that socket and waits until it closes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

START_S = 10.0
"""How long a command waits for a gateway that has announced its start."""
# How long a command waits for an announcement: `serve &` needs half a second to make it.
ANNOUNCE_S = 2.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 0.25
CONNECT_S = 1.0


@contextlib.contextmanager
def announced_start(port: int) -> Iterator[Callable[[], None]]:
    """Announce that a gateway starts on `port`, until the block ends or the yielded function is called."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        # OSError: another gateway announces this port. One of the two cannot listen on it, and says so.
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
    """Wait until something listens at `host`, this machine, or until no gateway can be expected there any more.

    Call `on_wait` if there is something to wait for. A return only means that the caller should try once more.
    """
    if _listens(host, port):
        return
    on_wait()
    give_up_s, pause_s = time.monotonic() + ANNOUNCE_S, FIRST_PAUSE_S
    while not wait_for_start(port) and not _listens(host, port) and time.monotonic() < give_up_s:
        # Poll, because no event reports that a process is about to announce its start.
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
