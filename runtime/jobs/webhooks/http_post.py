"""Sends HTTP POST requests to URLs of callers, and follows redirects, but only to allowed addresses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from errno import EACCES
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from ...._version import __version__
from ....addresses import Addresses
from ....errors import SettingsError, WebhookRefused
from .delivery import DeliveryAttempt

NETWORKS = "PILOTFLAME_WEBHOOK_NETWORKS"
"""The setting that allows other addresses than public ones."""
MAX_URL_CHARS = 2048
MAX_ERROR_CHARS = 300
REDIRECTS = frozenset({301, 302, 307, 308})
"""These statuses are followed with the same POST, also 301 and 302: a GET would not contain the message."""
MAX_REDIRECTS = 3
CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 4.0
"""How long an unused connection is kept. Most servers keep idle connections longer, so a server rarely closes a
connection that the next request uses.
"""


@dataclass(frozen=True, slots=True)
class AddressPolicy(Addresses):
    """Decides to which addresses webhooks may be sent: public addresses and the `allowed` networks."""

    @classmethod
    def parse(cls, networks: Sequence[str]) -> Self:
        """Return a policy that also allows `networks`, written as `10.1.0.0/16`, or raise SettingsError."""
        try:
            return cls.of(networks)
        except ValueError as error:
            raise SettingsError(
                f"The setting of networks that webhooks may call is invalid: {error}.",
                remedy="Write each as 10.1.0.0/16, fd00::/8 or 127.0.0.1.",
            ) from error

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Return a socket for one result of `getaddrinfo`. aiohttp calls this method as its `socket_factory`.

        Raise PermissionError if the address is not allowed. It is an OSError, so aiohttp tries the host's
        next address.
        """
        family, kind, protocol, _, address = info
        if reason := self.fault(str(address[0])):
            # The address is not shown, because that would reveal how names resolve in our network.
            allowed = f"{reason}; {NETWORKS} may allow it"
            raise PermissionError(EACCES, f"webhooks may not be sent to its address: {allowed}")
        return socket.socket(family, kind, protocol)

    def check(self, url: str) -> URL:
        """Return the parsed URL. Raise WebhookRefused if the text of the URL is not allowed.

        Host names are not resolved here: `socket` checks their addresses when a connection is opened.
        """
        try:
            parsed = URL(url)
            fault = _text_fault(url, parsed) or self._host_fault(parsed)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise _refusal(fault)
        return parsed

    def _host_fault(self, url: URL) -> str | None:
        host = (url.host or "").rstrip(".").lower()
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        try:
            # Use `inet_aton`, because it also reads 127.1, 0x7f000001 and 017700000001, which C libraries connect to.
            address = host if ":" in host else socket.inet_ntoa(socket.inet_aton(host))
        except OSError:
            return None
        reason = self.fault(address)
        return f"its host is {address} ({reason})" if reason else None


class HttpPoster:
    """An HTTP client for webhooks. Create it on the event loop that uses it."""

    def __init__(
        self, policy: AddressPolicy, *, timeout_s: float, resolver: AbstractResolver | None = None
    ) -> None:
        self._policy = policy
        self._timeout_s = timeout_s
        # 0 means no limit: the webhook sender limits how many requests run at a time.
        connector = aiohttp.TCPConnector(
            limit=0, resolver=resolver, socket_factory=policy.socket, keepalive_timeout=KEEP_ALIVE_S
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", "User-Agent": f"pilotflame/{__version__}"},
            auto_decompress=False,
            # No proxy from the environment is used: the policy could not check where the proxy connects to.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, now_s: float) -> DeliveryAttempt:
        """Send the body once and return the attempt. A failure is not raised but described in the attempt."""
        started_s = time.monotonic()
        status, error, wish_s = 0, "", 0.0
        try:
            async with asyncio.timeout(self._timeout_s):
                status, retry_after = await self._follow(url, headers, body)
                wish_s = parse_retry_after(retry_after, now_s)
        except TimeoutError:
            error = f"no response within {self._timeout_s:g} s"
        except WebhookRefused as refused:
            error = refused.message
        except Exception as failure:  # noqa: BLE001  a foreign server may cause any error
            error = f"{type(failure).__name__}: {failure}"
        ms = round((time.monotonic() - started_s) * 1000)
        return DeliveryAttempt(now_s, status, _printable(error), ms, wish_s)

    async def _follow(self, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        """Send the body and follow redirects, or raise WebhookRefused.

        Return the status and Retry-After header of the last response.
        """
        target = self._policy.check(url)
        for _ in range(MAX_REDIRECTS + 1):
            # The response body is not read. If it is long, aiohttp closes the connection.
            async with self._session.post(
                target, data=body, headers=headers, allow_redirects=False
            ) as response:
                location = response.headers.get("Location")
                if response.status not in REDIRECTS or location is None:
                    return response.status, response.headers.get("Retry-After", "")
            target = self._redirected(target, location)
        raise _refusal(f"it was redirected more than {MAX_REDIRECTS} times")

    def _redirected(self, target: URL, location: str) -> URL:
        try:
            found = target.join(URL(location))
        except ValueError as error:
            raise _refusal(f"it was redirected to an invalid URL ({error})") from error
        if target.scheme == "https" and found.scheme != "https":
            raise _refusal("it was redirected from https to a URL that is not https")
        return self._policy.check(str(found))


def parse_retry_after(text: str, now_s: float) -> float:
    """Return how many seconds a Retry-After header, a number or a date, asks to wait; 0 if it is invalid."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    # HTTP dates are always in GMT, even if they name no zone.
    return max(0.0, date.replace(tzinfo=date.tzinfo or UTC).timestamp() - now_s)


def _text_fault(text: str, url: URL) -> str | None:
    if len(text) > MAX_URL_CHARS:
        return f"its URL has more than {MAX_URL_CHARS} characters"
    if not text.isprintable() or " " in text:
        return "its URL contains spaces or control characters"
    if url.scheme not in ("http", "https"):
        return "its URL does not begin with http:// or https://"
    if not url.host:
        return "its URL has no host"
    if url.user is not None or url.password is not None:
        return "its URL contains credentials, which would be stored and shown"
    return "its URL has an invalid port" if not url.port else None


def _refusal(fault: str) -> WebhookRefused:
    return WebhookRefused(
        f"The webhook may not be sent: {fault}.",
        remedy=f"Use an http or https URL of a public address, or let the gateway's {NETWORKS} list the address.",
    )


def _printable(text: str) -> str:
    """Return a text from a foreign server for logs: at most MAX_ERROR_CHARS, control characters replaced."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])
