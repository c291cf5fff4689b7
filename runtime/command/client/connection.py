"""Provides a connection to a gateway: it waits for a gateway that starts, and raises the errors of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

import httpx

from ....addresses import is_loopback
from ....errors import GatewayError, GatewayUnreachable, PilotflameError, Unauthorized
from .address import CA_VARIABLE, DEFAULT_URL, trusted_authorities
from .gateway_start import wait_for_gateway

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
        if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
            remedy = "Check --api-key and PILOTFLAME_API_KEY; a key looks like pf_…."
            raise Unauthorized("The API key contains spaces or characters outside ASCII.", remedy=remedy)
        self.url = url.rstrip("/")
        self.on_loopback = is_loopback(_host(self.url))
        self._on_wait = on_wait if self.on_loopback and control is None else None
        # Without TLS, also of a proxy, no certificate is checked. To read the well-known authorities takes 36 ms.
        proxies = () if self.on_loopback else getproxies().values()
        plain = not any(url.lower().startswith("https:") for url in (self.url, *proxies))
        # A proxy that the environment names cannot reach a gateway on this machine. So ignore the proxy on loopback.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout,
            trust_env=not self.on_loopback,
            verify=not plain and (trusted_authorities() or True),
            headers=({"Authorization": f"Bearer {api_key}"} if api_key else {})
            | (control.headers if control else {}),
            transport=httpx.HTTPTransport(uds=str(control.path)) if control else None,
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
        """Yield a response whose body is read inside the block. Raise as `request` does, also during the block."""
        with self._translated_errors(), ExitStack() as stack:
            response = self._connected(
                lambda: stack.enter_context(self._http.stream(method, path, timeout=timeout, **request))
            )
            _check(response)
            yield response

    def _connected(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """Send a request and return its response. If nothing listens, wait for a starting gateway and send again."""
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
            remedy = "Start one with `pilotflame serve`, or name another with --url or PILOTFLAME_URL."
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                remedy = f"Let {CA_VARIABLE} name the PEM file of the authority that signed its certificate."
            raise GatewayUnreachable(f"No gateway answers at {self.url}: {error}.", remedy=remedy) from None
        except httpx.TimeoutException:
            slow = f"The gateway at {self.url} did not answer in time."
            raise GatewayError(slow, remedy="See its log, or try again.") from None
        except httpx.TransportError as error:
            broke = f"The connection to the gateway at {self.url} broke: {str(error).rstrip('.')}."
            raise GatewayError(broke, remedy="Check that it still runs, and call again.") from None


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a response, split at line feeds only.

    httpx's `iter_lines` also splits at U+2028, which JSON may contain.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def parse_events(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield (name, data) of each server-sent event. Drop a last event that is incomplete, without an empty line."""
    name, data = "message", list[str]()
    for line in split_lines(chunks):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "message", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _check(response: httpx.Response) -> None:
    """Raise the error in the body of `response`, unless its status is a success."""
    if response.is_success:
        return
    response.read()
    try:
        wire = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise _not_a_gateway(response) from None
    raise PilotflameError.from_wire(wire)


def json_of(response: httpx.Response) -> dict[str, Any]:
    try:
        found: dict[str, Any] = response.json()
    except ValueError:
        raise _not_a_gateway(response) from None
    return found


def _not_a_gateway(response: httpx.Response) -> GatewayError:
    text, status = " ".join(response.text.split())[:200], response.status_code
    wrong = f"{response.request.url} answered {status}, and not as a gateway does: {text!r}."
    return GatewayError(wrong, remedy="Check that --url (or PILOTFLAME_URL) names a pilotflame gateway.")


def _host(url: str) -> str:
    try:
        parsed, why = httpx.URL(url), "it must begin with http:// or https:// and name a host"
    except httpx.InvalidURL as error:
        parsed, why = httpx.URL(), str(error)
    if parsed.scheme in ("http", "https") and parsed.host:
        return parsed.host
    raise GatewayError(f"{url!r} is not a gateway's address: {why}.", remedy=f"An example: {DEFAULT_URL}.")
