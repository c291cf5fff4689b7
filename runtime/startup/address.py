"""Opens the address of a gateway: its socket and its certificate."""

from __future__ import annotations

import contextlib
import logging
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from ...addresses import is_loopback
from ..front.listening.sockets import bind, url_of
from ..front.listening.tls import Certificate
from ..ground.access.keyring import Keyring
from ..ground.settings.gateway_settings import GatewaySettings

LOG = logging.getLogger(__name__)
NO_ENGINE = (
    "there is no container engine, so nothing can be deployed with the API keys that may only deploy containers: {names}."
    " Install docker or podman, or see `pilotflame keys create --help` for --trusted."
)
NO_KEY_YET = (
    "{url} can be reached by other machines, and there is no API key yet: all routes except /healthz and"
    " /readyz refuse requests. Create a key: pilotflame keys create NAME --scope admin --state-dir {state}"
)


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where a gateway accepts requests."""

    socket: socket.socket
    certificate: Certificate | None
    """The certificate for HTTPS; None if the gateway serves HTTP."""
    url: str
    local: bool
    """True if no other machine can reach it."""


def open_address(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> GatewayAddress:
    """Bind the socket. Raise GatewayError if the port is taken."""
    certificate = _load_certificate(settings)
    sock = stack.enter_context(bind(settings.host, settings.port))
    url = url_of(sock, tls=certificate is not None)
    return GatewayAddress(sock, certificate, url, is_loopback(sock.getsockname()[0]))


def warn_of_keys(
    address: GatewayAddress, engine: str | None, keyring: Keyring, state: Path, *, local: bool
) -> None:
    """Warn of API keys with which nothing can be deployed. Unless all callers are `local`, also warn if there are no keys."""
    if (names := keyring.container_only) and not engine:
        LOG.warning("%s", NO_ENGINE.format(names=", ".join(names)))
    if not local and not keyring.exists:
        LOG.warning("%s", NO_KEY_YET.format(url=address.url, state=shlex.quote(str(state))))


def _load_certificate(settings: GatewaySettings) -> Certificate | None:
    """Return the certificate if the gateway serves HTTPS."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificate(settings.tls_cert, settings.tls_key)
