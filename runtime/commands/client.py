"""A client of the gateway's HTTP interface. Errors are raised as the classes that the gateway raised."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx

from ...addresses import is_loopback
from ...errors import GatewayError, GatewayUnreachable, PilotflameError, Unauthorized
from ..telemetry.timeline import parse_server_timing

DEFAULT_URL = "http://127.0.0.1:8600"
JSON_TYPE = "application/json"
EVENT_STREAM_TYPE = "text/event-stream"
CONNECT_TIMEOUT_S = 5.0
TIMEOUT = httpx.Timeout(30.0, connect=CONNECT_TIMEOUT_S)
# The gateway ends such a request itself, at a deadline that only it knows.
NO_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
# A deploy imports the handler, and with `install` builds an environment.
DEPLOY_TIMEOUT = httpx.Timeout(1800.0, connect=CONNECT_TIMEOUT_S)


class StreamEvent(NamedTuple):
    """One server-sent event."""

    name: str
    data: str


class InvokeReply:
    """The response to one invocation while its connection is open: read it whole, or piece by piece."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        headers = response.headers
        self.content_type: str = headers.get("Content-Type", "").partition(";")[0].strip()
        self.streaming = self.content_type == EVENT_STREAM_TYPE
        self.cold = headers.get("X-Cold-Start") == "true"
        self.worker: str = headers.get("X-Worker-Id", "")
        self.request_id: str = headers.get("X-Request-Id", "")
        self.timing_ms: dict[str, float] = parse_server_timing(headers.get("Server-Timing", ""))

    def value(self) -> Any:
        """Return the whole answer: a JSON value, a list of a stream's pieces, or bytes."""
        if self.streaming:
            return list(self.pieces())
        body = self._response.read()
        return json.loads(body) if self.content_type == JSON_TYPE else body

    def pieces(self) -> Iterator[Any]:
        """Yield a stream's pieces as they arrive. Raise the error that ends the stream."""
        for event in parse_events(self._response.iter_bytes()):
            if event.name == "output":
                yield json.loads(event.data)
            elif event.name == "error":
                raise PilotflameError.from_wire(json.loads(event.data))
            elif event.name == "completed":
                return
        raise GatewayError("The stream broke off before its end.", remedy="Call again.")


class Client:
    """A connection to the gateway at `url`, or through its control socket. A context manager."""

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str = "", control_socket: Path | None = None
    ) -> None:
        self.url = url.rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise _bad_url(url, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _bad_url(url, "it must begin with http:// or https:// and name a host")
        self.on_loopback = is_loopback(parsed.host)
        self._http = httpx.Client(
            base_url=self.url,
            timeout=TIMEOUT,
            # A proxy for outside addresses does not reach this machine.
            trust_env=not self.on_loopback,
            headers=_authorization(api_key),
            transport=None if control_socket is None else httpx.HTTPTransport(uds=str(control_socket)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    @contextmanager
    def call(
        self, name: str, body: bytes = b"", *, content_type: str = JSON_TYPE, timeout_s: float | None = None
    ) -> Iterator[InvokeReply]:
        """Invoke a function; the reply is valid inside the block. Raise the gateway's error."""
        headers = {"Content-Type": content_type}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        with self._stream("POST", _path("invoke", name), content=body, headers=headers) as response:
            yield InvokeReply(response)

    def invoke(self, name: str, event: Any = None) -> Any:
        """Invoke a function with a JSON event and return its answer; of a stream, the list of its pieces."""
        with self.call(name, json.dumps(event).encode()) as reply:
            return reply.value()

    def submit(self, name: str, request: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
        """Submit `{"input": …, "webhook": …, "policy": …}` as a job. Return its id, its status, and
        `replayed`: True if the gateway already had a job with this idempotency key.
        """
        headers = {"Content-Type": JSON_TYPE} | ({"Idempotency-Key": key} if key else {})
        # httpx's own `json=` does not escape lone surrogates, which UTF-8 cannot encode.
        content = json.dumps(request).encode()
        response = self._request("POST", _path("v2", name, "run"), content=content, headers=headers)
        return _json_of(response) | {"replayed": response.headers.get("Idempotent-Replayed") == "true"}

    def follow(self, name: str, job_id: str, *, after: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield a job's events after piece number `after`: ("status", …), ("output", piece), and at the end
        ("completed" or "error", the whole job).
        """
        headers = {"Accept": EVENT_STREAM_TYPE, "Last-Event-ID": str(after)}
        with self._stream("GET", _path("v2", name, "stream", job_id), headers=headers) as response:
            for event in parse_events(response.iter_bytes()):
                yield event.name, json.loads(event.data)
                if event.name in ("completed", "error"):
                    return
        raise GatewayError(
            "The stream broke off before its end; the job goes on.", remedy="Follow the job again, by its id."
        )

    def deploy(
        self,
        folder: Path,
        *,
        overrides: Mapping[str, Any] | None = None,
        install: bool = False,
        check: bool = True,
        upload: bool = False,
    ) -> dict[str, Any]:
        """Deploy a folder: with `upload` send its files, else its path, for a gateway on this machine."""
        request: dict[str, Any]
        if upload:
            # Only uploads need the code that packs folders.
            from ..functions.code import pack  # noqa: PLC0415

            settings = [f"{key}={value}" for key, value in (overrides or {}).items()]
            request = {
                "content": pack(folder),
                "headers": {"Content-Type": "application/gzip"},
                "params": {"install": int(install), "check": int(check), "set": settings},
            }
        else:
            body = {
                "path": str(folder.resolve()),
                "overrides": overrides or {},
                "install": install,
                "check": check,
            }
            request = {"json": body}
        return _json_of(self._request("POST", "/v1/functions", timeout=DEPLOY_TIMEOUT, **request))

    def logs(self, name: str, *, lines: int = 100, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the last lines of a function's log; with `follow`, every new line until the caller stops."""
        params = {"lines": lines, "follow": int(follow)}
        timeout = NO_TIMEOUT if follow else TIMEOUT
        path = _path("v1", "functions", name, "logs")
        with self._stream("GET", path, params=params, timeout=timeout) as response:
            yield from (json.loads(line) for line in split_lines(response.iter_bytes()) if line)

    # -- any route: `path` is its segments

    def get(self, *path: str, **params: Any) -> dict[str, Any]:
        return _json_of(self._request("GET", _path(*path), params=params))

    def post(self, *path: str, body: Any = None, **params: Any) -> dict[str, Any]:
        return _json_of(self._request("POST", _path(*path), json=body, params=params))

    def put(self, *path: str, body: Any) -> dict[str, Any]:
        return _json_of(self._request("PUT", _path(*path), json=body))

    def delete(self, *path: str) -> None:
        self._request("DELETE", _path(*path))

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        with self._translated_errors():
            response = self._http.request(method, path, **request)
        _check(response)
        return response

    @contextmanager
    def _stream(
        self, method: str, path: str, *, timeout: httpx.Timeout = NO_TIMEOUT, **request: Any
    ) -> Iterator[httpx.Response]:
        with (
            self._translated_errors(),
            self._http.stream(method, path, timeout=timeout, **request) as response,
        ):
            _check(response)
            yield response

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise the errors of httpx as errors of ours."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise GatewayUnreachable(
                f"No gateway answers at {self.url}: {error}.",
                remedy="Start one with `pilotflame serve`, or name another with --url or PILOTFLAME_URL.",
            ) from None
        except httpx.TimeoutException:
            raise GatewayError(
                f"The gateway at {self.url} did not answer in time.", remedy="See its log, or try again."
            ) from None
        except httpx.TransportError as error:
            raise GatewayError(
                f"The connection to the gateway at {self.url} broke: {str(error).rstrip('.')}.",
                remedy="Check that it still runs, and call again.",
            ) from None


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield lines that end with a line feed. (iter_lines also splits at U+2028, which JSON may contain.)"""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def parse_events(chunks: Iterable[bytes]) -> Iterator[StreamEvent]:
    """Yield server-sent events without comments. An event without its closing empty line is dropped."""
    name, data = "message", list[str]()
    for line in split_lines(chunks):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield StreamEvent(name, "\n".join(data))
            name, data = "message", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _check(response: httpx.Response) -> None:
    """Raise the error that the response holds, if it is not a success."""
    if response.is_success:
        return
    response.read()
    try:
        wire = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise _not_a_gateway(response) from None
    raise PilotflameError.from_wire(wire)


def _json_of(response: httpx.Response) -> dict[str, Any]:
    try:
        found: dict[str, Any] = response.json()
    except ValueError:
        raise _not_a_gateway(response) from None
    return found


def _not_a_gateway(response: httpx.Response) -> GatewayError:
    text = " ".join(response.text.split())[:200]
    return GatewayError(
        f"{response.request.url} answered {response.status_code}, and not as a gateway does: {text!r}.",
        remedy="Check that --url (or PILOTFLAME_URL) names a pilotflame gateway.",
    )


def _bad_url(url: str, why: str) -> GatewayError:
    return GatewayError(f"{url!r} is not a gateway's address: {why}.", remedy=f"An example: {DEFAULT_URL}.")


def _authorization(api_key: str) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise Unauthorized(
            "The API key is malformed: it contains spaces or characters outside ASCII.",
            remedy="Check --api-key and PILOTFLAME_API_KEY; a key looks like pf_….",
        )
    return {"Authorization": f"Bearer {api_key}"}


def _path(*segments: str) -> str:
    """Return a path; each segment is quoted, so that a name cannot reach another route."""
    return "".join(f"/{quote(segment, safe='')}" for segment in segments)
