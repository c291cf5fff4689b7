"""Sends requests to a gateway on an event loop, each with a deadline, and repeats failed requests if that is safe."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from yarl import URL

from ....errors import BadInput, DeadlineExceeded, FunctionStopped, OutputTooLarge, PilotflameError
from ..client.address import authorization, proxy_of, trusted_authorities
from ..client.request_errors import answered, broken, unreachable

TIMEOUT_S = 600.0
RETRY_S = 60.0
CONCURRENCY = 16
MAX_CONCURRENCY = 256
# `map` starts calls ahead: at most AHEAD times `concurrency` calls have answers that the caller has not taken yet.
AHEAD = 4
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 1024
MAX_ANSWER_BYTES = 1 << 30
FIRST_RETRY_S = 2.0
"""Before the first response of the gateway, requests are repeated for at most this time, because the address may be wrong."""
# Wait for a response until this long after the deadline. The gateway ends a call at its deadline, and then answers.
GRACE_S = 2.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
# The statuses that proxies answer while a gateway restarts. A request that is `safe` is repeated after such a response.
_TEMPORARY = frozenset({502, 503, 504})


class Order(NamedTuple):
    """A request. If it is `safe`, it may be sent again after its connection broke."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    safe: bool = False


class Reply(NamedTuple):
    """The response to a request that succeeded."""

    url: str
    status: int
    content_type: str
    body: bytes


class _Failure(NamedTuple):
    """A failed attempt. The request may be sent again after `wait_s` seconds.

    0 stands for a pause that grows with each attempt. None means that the request must not be sent again.
    """

    error: PilotflameError
    wait_s: float | None


class GatewaySession:
    """The connections to the gateway at `url`: a pool for each event loop that sends requests."""

    def __init__(self, url: str, *, api_key: str, retry_s: float) -> None:
        """A request is repeated for at most `retry_s` seconds."""
        self.url = url.rstrip("/")
        self._proxy = proxy_of(self.url)
        self._headers = authorization(api_key, self.url)
        self._retry_s = retry_s
        self._allowed_s = min(retry_s, FIRST_RETRY_S)
        # The session of each event loop, because a session works on one loop only. A forked child opens its own session, and
        # does not close the sessions of its parent.
        self._opened = dict[asyncio.AbstractEventLoop, aiohttp.ClientSession]()

    async def close(self) -> None:
        if (session := self._opened.pop(asyncio.get_running_loop(), None)) is not None:
            await session.close()

    async def send(self, order: Order, timeout_s: float) -> Reply:
        """Return the response. Raise the error that the gateway answers, GatewayError, OutputTooLarge, or DeadlineExceeded."""
        deadline_s, failing_since_s, pause_s = time.monotonic() + timeout_s, 0.0, FIRST_PAUSE_S
        while True:
            found = await self._attempt(order, max(0.001, deadline_s - time.monotonic()))
            if isinstance(found, Reply):
                return found
            now_s = time.monotonic()
            failing_since_s = failing_since_s or now_s
            next_s = now_s + (found.wait_s or pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            if found.wait_s is None or next_s > min(deadline_s, failing_since_s + self._allowed_s):
                raise found.error
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(next_s - now_s)

    async def _attempt(self, order: Order, left_s: float) -> Reply | _Failure:
        try:
            async with asyncio.timeout(left_s + GRACE_S):
                return await self._exchange(order, left_s)
        except aiohttp.ClientSSLError as error:
            return _Failure(unreachable(self.url, error), None)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return _Failure(unreachable(self.url, error), 0.0)
        except aiohttp.ClientError as error:
            return _Failure(broken(self.url, error), 0.0 if order.safe else None)
        except TimeoutError:
            remedy = "Allow more time with timeout_s, or submit a job, which goes on without its caller."
            late = f"The gateway at {self.url} did not answer within {left_s:.1f} s."
            raise DeadlineExceeded(late, remedy=remedy) from None

    async def _exchange(self, order: Order, left_s: float) -> Reply | _Failure:
        # With `encoded`, a quoted slash in a function's name stays quoted.
        url = URL(self.url + order.path, encoded=True)
        headers = {**order.headers, "X-Request-Timeout": f"{left_s:.3f}"}
        async with self._http.request(
            order.method, url, data=order.body, headers=headers, allow_redirects=False
        ) as response:
            self._allowed_s = self._retry_s
            status, body = response.status, bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    large = f"The answer of {url} is larger than {MAX_ANSWER_BYTES} bytes."
                    raise OutputTooLarge(large, remedy="Let the function store it, and return its address.")
            if status < 300:
                return Reply(str(url), status, response.content_type, bytes(body))
            error = answered(str(url), status, bytes(body), response.headers.get("Location", ""))
            wait_s = _asked_wait_s(error, response.headers)
            safe_s = 0.0 if order.safe and status in _TEMPORARY else None
            return _Failure(error, safe_s if wait_s is None else wait_s)

    @property
    def _http(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            authorities = trusted_authorities(self.url)
            self._opened[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=authorities or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                headers=self._headers,
                # Name the proxy, and do not set trust_env: with it, a password of ~/.netrc would replace the key.
                proxy=self._proxy,
            )
        return self._opened[loop]


def _asked_wait_s(error: PilotflameError, headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which a response asks for the same request again, or None if it does not ask."""
    if isinstance(error, FunctionStopped) and "retry_after_s" not in error.details:
        # Do not repeat the request, because a person has to end this state.
        return None
    exact_ms, rounded_s = headers.get("retry-after-ms", ""), headers.get("Retry-After", "")
    if exact_ms.isdecimal():
        return int(exact_ms) / 1000
    return float(rounded_s) if rounded_s.isdecimal() else None


def slots_of(concurrency: int) -> asyncio.Semaphore:
    """Return a semaphore for `concurrency` calls. Raise BadInput if `map` does not take that number."""
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        remedy = f"It must be from 1 to {MAX_CONCURRENCY}."
        raise BadInput(f"The concurrency is {concurrency}.", remedy=remedy)
    return asyncio.Semaphore(concurrency)
