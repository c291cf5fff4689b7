"""Which addresses a webhook may be sent to, by number, by the text of a URL, and where a socket is made."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EACCES
from typing import Any, Self

from yarl import URL

from ...addresses import Addresses
from ...errors import SettingsError, WebhookRefused

MAX_URL_CHARS = 2048


@dataclass(frozen=True, slots=True)
class AddressPolicy(Addresses):
    """Public addresses may be called, and besides these what lies in the `allowed` networks."""

    @classmethod
    def parse(cls, networks: Sequence[str]) -> Self:
        """From texts as `10.1.0.0/16` or `127.0.0.1`. SettingsError names what is none."""
        try:
            return cls.of(networks)
        except ValueError as error:
            raise SettingsError(
                f"A network that webhooks may be sent to cannot be taken: {error}.",
                remedy="Write it as 10.1.0.0/16, fd00::/8 or 127.0.0.1.",
            ) from error

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for what `getaddrinfo` gave: aiohttp's `socket_factory`. PermissionError if it may not be called."""
        family, kind, protocol, _, address = info
        if reason := self.fault(str(address[0])):
            # An OSError is what the connector expects here: it tries the name's other addresses. The address is not
            # told: whoever names a host would learn what it is within our network.
            raise PermissionError(EACCES, f"webhooks may not be sent to its address: {reason}")
        return socket.socket(family, kind, protocol)

    def check(self, url: str) -> URL:
        """The URL if a webhook may be sent there as far as its text tells, else WebhookRefused.

        Names are not resolved here: what they resolve to is checked each time when it is connected to.
        """
        try:
            parsed = URL(url)
            fault = _text_fault(url, parsed) or self._host_fault(parsed)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise refusal(fault)
        return parsed

    def _host_fault(self, url: URL) -> str | None:
        host = (url.host or "").rstrip(".").lower()
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        try:
            # The spellings that C libraries take for an address: 127.1, 0x7f000001, 017700000001.
            address = host if ":" in host else socket.inet_ntoa(socket.inet_aton(host))
        except OSError:
            return None
        reason = self.fault(address)
        return f"its host is {address} ({reason})" if reason else None


def refusal(fault: str) -> WebhookRefused:
    """The error for an address that may not be called."""
    return WebhookRefused(
        f"The webhook may not be sent: {fault}.",
        remedy="Give an http or https URL of a public address; the gateway's settings may allow others.",
    )


def _text_fault(text: str, url: URL) -> str | None:
    if len(text) > MAX_URL_CHARS:
        return f"its URL has more than {MAX_URL_CHARS} characters"
    if not text.isprintable() or " " in text:
        return "its URL has spaces or control characters"
    if url.scheme not in ("http", "https"):
        return "its URL is not of http or https"
    if not url.host:
        return "its URL names no host"
    if url.user is not None or url.password is not None:
        return "its URL has credentials, which would be stored and shown"
    return "its URL names no port that there is" if not url.port else None
