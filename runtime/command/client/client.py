"""Provides a client of the gateway's HTTP interface. It raises an error of the gateway as the same exception class."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from ....addresses import is_loopback
from ....errors import GatewayError, GatewayUnreachable, PilotflameError, Unauthorized
from ...ground.access.control_socket import ControlAddress
from ...ground.telemetry.timeline import parse_server_timing
from .address import CA_VARIABLE, DEFAULT_URL, trusted_authorities
from .gateway_start import wait_for_gateway

JSON_TYPE = "application/json"
EVENT_STREAM_TYPE = "text/event-stream"
CONNECT_TIMEOUT_S = 5.0
ANSWER_S = 30.0
TIMEOUT = httpx.Timeout(ANSWER_S, connect=CONNECT_TIMEOUT_S)
# For requests of shell completion, during which the shell is blocked.
COMPLETION_TIMEOUT = httpx.Timeout(1.0)
# For requests that only the gateway ends, for example an invocation, which ends at its deadline.
NO_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
# A deploy takes long: it imports the handler, and with `install` it also installs requirements.
DEPLOY_TIMEOUT = httpx.Timeout(1800.0, connect=CONNECT_TIMEOUT_S)
OnProgress = Callable[[str, dict[str, Any]], None]
"""A function that is called with the name of an event of a deploy ("function", "step" or "note") and its data."""


def _ignore(_event: str, _told: dict[str, Any]) -> None:
    """Ignore an event of a deploy."""


class InvokeReply:
    """The response to one invocation. Read it whole or piece by piece, while its connection is open."""

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
        """Return the whole answer: a JSON value, bytes, or for a stream the list of its pieces."""
        if self.streaming:
            return list(self.pieces())
        body = self._response.read()
        return json.loads(body) if self.content_type == JSON_TYPE else body

    def pieces(self) -> Iterator[Any]:
        """Yield a stream's pieces. Raise the error that ends the stream, or GatewayError if the stream breaks off."""
        for event, data in parse_events(self._response.iter_bytes()):
            if event == "output":
                yield json.loads(data)
            elif event == "error":
                raise PilotflameError.from_wire(json.loads(data))
            elif event == "completed":
                return
        raise GatewayError("The stream broke off before its end.", remedy="Call again.")


class Client:
    """A client of the gateway at `url`, or behind a control socket. Use it as a context manager."""

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str = "", control: ControlAddress | None = None,
        timeout: httpx.Timeout = TIMEOUT, on_wait: Callable[[str], None] | None = None,
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
        # Without TLS and proxies, no certificate is checked. To read the well-known authorities takes 36 ms.
        plain = self.on_loopback and not self.url.startswith("https:")
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    @contextmanager
    def call(
        self, name: str, body: bytes = b"", *, content_type: str = JSON_TYPE, timeout_s: float | None = None
    ) -> Iterator[InvokeReply]:
        """Invoke a function, and yield the reply, which can be read only inside the block."""
        headers = {"Content-Type": content_type}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        with self._stream("POST", _path("invoke", name), content=body, headers=headers) as response:
            yield InvokeReply(response)

    def submit(self, name: str, request: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
        """Submit a job: `{"input": …, "webhook": …, "ttl_s": …}`. Return its id and status.

        `replayed` is True in the result if the gateway already had a job with this idempotency key.
        """
        headers = {"Content-Type": JSON_TYPE} | ({"Idempotency-Key": key} if key else {})
        # httpx's own `json=` does not escape lone surrogates, which UTF-8 cannot encode.
        response = self._request(
            "POST", _path(*jobs_of(name)), content=json.dumps(request).encode(), headers=headers
        )
        job, replayed = _json_of(response), response.headers.get("Idempotent-Replayed") == "true"
        return {"id": job["id"], "status": job["status"], "replayed": replayed}

    def follow(self, name: str, job_id: str, *, after: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield a job's events as (name, data), without the first `after` pieces.

        The events are ("status", …), ("output", piece), and at the end ("completed" or "error", the whole job).
        Raise GatewayError if the stream breaks off before the end.
        """
        headers = {"Accept": EVENT_STREAM_TYPE, "Last-Event-ID": str(after)}
        with self._stream("GET", _path(*jobs_of(name), job_id, "events"), headers=headers) as response:
            for event, data in parse_events(response.iter_bytes()):
                yield event, json.loads(data)
                if event in ("completed", "error"):
                    return
        raise GatewayError("The stream broke off; the job goes on.", remedy="Follow it again, by its id.")

    def deploy(
        self, folder: Path, overrides: Mapping[str, Any], *, seen_as: str = "", on_progress: OnProgress = _ignore,
        **flags: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Deploy a folder that the gateway reads itself, and return the function's status.

        Call `on_progress` with each event of the deploy. Raise FolderUnseen if the identity `seen_as` is given and the
        gateway sees another folder at this path. `flags` can be `install` and `check`, which the gateway's route takes.
        """
        order = {"path": str(folder.resolve()), "seen_as": seen_as, "overrides": overrides, **flags}
        return self._deploy(on_progress, json=order)

    def upload(
        self, archive: bytes, overrides: Mapping[str, Any], *, folder: str, base: str = "",
        on_progress: OnProgress = _ignore, **flags: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Deploy a folder from `archive`, a tar.gz of its files. `folder` is the folder's name. The progress events,
        the flags and the result are the same as with `deploy`.

        The archive may list files that it does not hold. The gateway takes these files from the live revision `base`,
        which is written FUNCTION/REVISION. Raise BaseChanged if another revision is live.
        """
        params: dict[str, Any] = {
            "folder": folder,
            "set": [f"{key}={value}" for key, value in overrides.items()],
        }
        params |= {name: int(flag) for name, flag in flags.items()} | ({"base": base} if base else {})
        headers = {"Content-Type": "application/gzip"}
        return self._deploy(on_progress, content=archive, headers=headers, params=params)

    def _deploy(
        self, on_progress: OnProgress, *, headers: Mapping[str, str] | None = None, **request: Any
    ) -> dict[str, Any]:
        headers = {"Accept": EVENT_STREAM_TYPE, **(headers or {})}
        with self._stream(
            "POST", "/v1/functions", timeout=DEPLOY_TIMEOUT, headers=headers, **request
        ) as response:
            for name, data in parse_events(response.iter_bytes()):
                told: dict[str, Any] = json.loads(data)
                if name == "completed":
                    return told
                if name == "error":
                    raise PilotflameError.from_wire(told)
                on_progress(name, told)
        remedy = "Ask `pilotflame list` which revision is live, and the gateway's log for the reason."
        raise GatewayError("The deploy's progress broke off before its end.", remedy=remedy)

    def replace(self, name: str, how: str, **order: Any) -> dict[str, Any]:
        """Change the live revision of a function, and return the function's status. `how` ends the route's path."""
        path = _path("v1", "functions", name, how)
        return _json_of(self._request("POST", path, json=order, timeout=DEPLOY_TIMEOUT))

    def logs(self, name: str, *, lines: int = 100, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the last lines of a function's log. `query` is as in `gateway_log`."""
        yield from self._lines(_path("v1", "functions", name, "logs"), {"lines": lines, **query})

    def gateway_log(self, name: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield lines of the log "gateway", "audit" or "access".

        `query` has the parameters of the route. With `follow`, yield each new line until the caller stops.
        """
        yield from self._lines(_path("v1", "logs", name), query)

    def views(self) -> Iterator[dict[str, Any]]:
        """Yield the content of the console. Then yield each second the functions that have changed in it."""
        yield from self._lines(_path("v1", "console"), {"follow": True})

    def _lines(self, path: str, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        params = {
            key: int(value) if isinstance(value, bool) else value
            for key, value in query.items()
            if value is not None
        }
        timeout = NO_TIMEOUT if query.get("follow") else TIMEOUT
        with self._stream("GET", path, params=params, timeout=timeout) as response:
            yield from (json.loads(line) for line in split_lines(response.iter_bytes()) if line)

    def prefetch(self, name: str) -> dict[str, Any]:
        """Bring a function's image and weights to the gateway's machine. Return facts about them."""
        return _json_of(self._request("POST", _path("v1", "functions", name, "prefetch"), timeout=NO_TIMEOUT))

    def warm(self, name: str, *, wait_s: int, **query: Any) -> dict[str, int]:
        """Start workers of a function, and wait up to `wait_s` until they are ready. Return their number by state."""
        params, timeout = (
            query | {"wait_s": wait_s},
            httpx.Timeout(ANSWER_S + wait_s, connect=CONNECT_TIMEOUT_S),
        )
        path = _path("v2", name, "warmup")
        return dict(_json_of(self._request("POST", path, params=params, timeout=timeout))["workers"])

    # -- requests to any route; `path` holds the segments of the route's path

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
            response = self._connected(lambda: self._http.request(method, path, **request))
        _check(response)
        return response

    @contextmanager
    def _stream(
        self, method: str, path: str, *, timeout: httpx.Timeout = NO_TIMEOUT, **request: Any
    ) -> Iterator[httpx.Response]:
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


def jobs_of(name: str) -> tuple[str, ...]:
    """Return the segments of the path of a function's jobs."""
    return "v1", "functions", name, "jobs"


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


def _json_of(response: httpx.Response) -> dict[str, Any]:
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


def _path(*segments: str) -> str:
    """Return the path of a route. Each segment is quoted, so that a function's name cannot lead to another route."""
    return "".join(f"/{quote(segment, safe='')}" for segment in segments)
