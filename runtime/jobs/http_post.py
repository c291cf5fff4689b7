"""Posting: one body to one URL, over redirects, to nobody whom the policy of addresses does not allow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from ..._version import __version__
from ...errors import WebhookRefused
from .webhook_addresses import AddressPolicy, refusal
from .webhook_backoff import wish_s
from .webhook_delivery import MAX_ERROR_CHARS, DeliveryAttempt

REDIRECTS = frozenset({301, 302, 307, 308})
"""All of them are followed by the same POST: a webhook asked for by GET would say nothing."""
MAX_REDIRECTS = 3
# Shorter than what servers keep a connection for, so that few are sent into one that is being closed.
KEEP_ALIVE_S = 4.0

_HEADERS = {"Content-Type": "application/json", "User-Agent": f"pilotflame/{__version__}"}


class HttpPoster:
    """An HTTP client that follows redirects itself. To be entered on the event loop that uses it."""

    def __init__(
        self,
        policy: AddressPolicy,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._policy = policy
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._resolver = resolver

    async def __aenter__(self) -> Self:
        # No proxies from the environment: behind one, nobody could check what it connects to.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the courier bounds it
                resolver=self._resolver,
                socket_factory=self._policy.socket,
                keepalive_timeout=KEEP_ALIVE_S,
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, now_s: float) -> DeliveryAttempt:
        """Send it once. Whatever comes of it is an attempt, never an error."""
        begun = time.monotonic()
        status, error, wish = 0, "", 0.0
        try:
            async with asyncio.timeout(self._timeout_s):
                status, retry_after = await self._follow(url, headers, body)
                wish = wish_s(retry_after, now_s)
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except WebhookRefused as refused:
            error = refused.message
        except Exception as failure:  # noqa: BLE001  a stranger's server may provoke anything: it ends this attempt only
            error = f"{type(failure).__name__}: {failure}"
        ms = round((time.monotonic() - begun) * 1000)
        return DeliveryAttempt(now_s, status, _printable(error), ms, wish)

    async def _follow(self, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        """The status of the last hop and its Retry-After."""
        target = self._policy.check(url)
        for _ in range(MAX_REDIRECTS + 1):
            # The answer's body is nobody's business: it is left unread, and its connection closed if it is long.
            async with self._session.post(
                target, data=body, headers=headers, allow_redirects=False
            ) as answer:
                location = answer.headers.get("Location")
                if answer.status not in REDIRECTS or location is None:
                    return answer.status, answer.headers.get("Retry-After", "")
            target = self._next(target, location)
        raise refusal(f"it was redirected more than {MAX_REDIRECTS} times")

    def _next(self, target: URL, location: str) -> URL:
        try:
            found = target.join(URL(location))
        except ValueError as error:
            raise refusal(f"it was redirected to what is no URL ({error})") from error
        if target.scheme == "https" and found.scheme != "https":
            raise refusal("it was redirected from https to a URL that is not")
        return self._policy.check(str(found))


def _printable(text: str) -> str:
    """Text of strangers, fit for a log."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])
