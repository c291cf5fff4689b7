"""Provides a connection to a gateway: it waits for a gateway that starts, and raises the errors of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

import httpx

from ....addresses import is_loopback
from ....errors import GatewayError
from .address import DEFAULT_URL, authorization, host_of, trusted_authorities
from .gateway_start import wait_for_gateway
from .request_errors import answered, broken, check_gateway, json_object, unreachable

if TYPE_CHECKING:
    from ...ground.access.control_socket import ControlAddress

CONNECT_TIMEOUT_S = 5.0
ANSWER_S = 30.0
TIMEOUT = httpx.Timeout(ANSWER_S, connect=CONNECT_TIMEOUT_S)
# For requests of shell completion, during which the shell is blocked.
COMPLETION_TIMEOUT = httpx.Timeout(1.0)
# For requests that only the gateway ends, for example an invocation, which ends at its deadline.
NO_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)


class GatewayConnection:
    """A connection to the gateway at `url`, or behind a control socket."""

    def __init__(
        self, url: str, *, api_key: str, control: ControlAddress | None,
        timeout: httpx.Timeout, on_wait: Callable[[str], None] | None,
    ) -> None:  # fmt: skip
        """With `on_wait`, requests wait for a gateway on this machine that is starting.

        When such a wait begins, the client calls `on_wait` with a line for the user.
        """
        self.url = url.rstrip("/")
        self.on_loopback = is_loopback(host_of(self.url))
        self._on_wait = on_wait if self.on_loopback and control is None else None
        self._unknown = self.url == DEFAULT_URL and control is None
        # If neither the gateway nor a proxy uses TLS, do not read the well-known authorities, which takes 36 ms.
        proxies = () if self.on_loopback else getproxies().values()
        plain = not any(url.lower().startswith("https:") for url in (self.url, *proxies))
        # A proxy that the environment names cannot reach a gateway on this machine. So ignore the proxy on loopback.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout,
            trust_env=not self.on_loopback,
            verify=not plain and (trusted_authorities() or True),
            headers=authorization(api_key, self.url) | (control.headers if control else {}),
            transport=httpx.HTTPTransport(uds=str(control.path), verify=False) if control else None,
        )

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Return a whole response. Raise GatewayUnreachable, GatewayError, or the error that the gateway answers."""
        with self._translated_errors():
            response = self._connected(lambda: self._http.request(method, path, **request))
        _check(response)
        return response

    @contextmanager
    def stream(
        self, method: str, path: str, *, timeout: httpx.Timeout = NO_TIMEOUT, **request: Any
    ) -> Iterator[httpx.Response]:
        """Yield a response whose body is read inside the block. Raise the same errors as `request`, also during the block."""
        with self._translated_errors(), ExitStack() as stack:
            response = self._connected(
                lambda: stack.enter_context(self._http.stream(method, path, timeout=timeout, **request))
            )
            _check(response)
            yield response

    def _connected(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """Send a request and return its response. If nothing listens, wait for a starting gateway and send again.

        At the default address, any other server may listen. So before the first request, ask the server for its name,
        without the API key.
        """
        if self._unknown:
            asked = self._http.build_request("GET", "/")
            asked.headers.pop("Authorization", None)
            named = self._sent(lambda: self._http.send(asked))
            check_gateway(self.url, named.status_code, named.content)
            self._unknown = False
        return self._sent(send)

    def _sent(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        try:
            return send()
        except httpx.ConnectError:
            if (on_wait := self._on_wait) is None:
                raise
        address = self._http.base_url
        port = address.port or (443 if address.scheme == "https" else 80)
        wait_for_gateway(address.host, port, lambda: on_wait(f"waiting for a gateway to start at {self.url}"))
        return send()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turn errors of httpx that the block raises into errors of pilotflame."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(self.url, error) from None
        except httpx.TimeoutException:
            slow = f"The gateway at {self.url} did not answer in time."
            raise GatewayError(slow, remedy="See its log, or try again.") from None
        except httpx.TransportError as error:
            raise broken(self.url, error) from None


def _check(response: httpx.Response) -> None:
    """Raise the error in the body of `response`, unless its status is a success."""
    if response.is_success:
        return
    target = response.headers.get("Location", "")
    raise answered(str(response.request.url), response.status_code, response.read(), target)


def json_of(response: httpx.Response) -> dict[str, Any]:
    return json_object(str(response.request.url), response.status_code, response.content)
