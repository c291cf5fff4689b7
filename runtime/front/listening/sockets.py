"""Binds the address of a server, or takes the socket that systemd has bound."""

from __future__ import annotations

import os
import socket

from ....errors import GatewayError
from ...ground.telemetry.refusals import Operation, refusal

# The file descriptor of the first socket that systemd passes.
FIRST_PASSED = 3


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address; port 0 is any free port. Raise GatewayError if the address cannot be
    bound.

    If systemd has passed a socket to this process, return that socket instead.
    """
    if os.environ.pop("LISTEN_PID", "") == str(os.getpid()):
        return _passed(os.environ.pop("LISTEN_FDS", ""))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        remedy = "Use --host 127.0.0.1."
        raise GatewayError(f"{host} is no address of this machine: {error}.", remedy=remedy) from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        refused = refusal(Operation.LISTEN, error.errno, "Choose another --host or --port.")
        raise GatewayError(f"Cannot listen on {host}:{port}: {refused.why}.", remedy=refused.remedy) from None
    return sock


def _passed(count: str) -> socket.socket:
    """Return the socket of ListenStream= of a unit. systemd has bound the socket, and passes it as in sd_listen_fds(3)."""
    remedy = "Give the .socket unit one ListenStream= with an address and a port."
    if count != "1":
        message = f"LISTEN_FDS={count}: the gateway takes one socket of systemd."
        raise GatewayError(message, remedy=remedy)
    try:
        sock = socket.socket(fileno=FIRST_PASSED)
    except OSError as error:
        raise GatewayError(f"systemd passes no socket: {error.strerror}.", remedy=remedy) from error
    sock.set_inheritable(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        raise GatewayError(f"The socket of systemd, {sock.getsockname()!r}, is not for TCP.", remedy=remedy)
    return sock


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    (host, port), scheme = sock.getsockname()[:2], "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
