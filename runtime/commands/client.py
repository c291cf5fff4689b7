"""The client: a gateway's HTTP interface as Python calls. Errors come back as the classes they were raised as."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
REPLY_TIMEOUT_S = 30.0
# A deploy imports the handler, and with `install` builds an environment.
DEPLOY_TIMEOUT_S = 1800.0
# A number above that of any piece: of a job that one waits for, only the end is of interest.
ALL_PIECES = 999_999_999


class StreamEvent(NamedTuple):
    """One server-sent event."""

    name: str
    data: str


class InvokeReply:
    """One invocation's answer, while its connection is open: read it whole, or piece by piece."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        headers = response.headers
        self.content_type: str = headers.get("Content-Type", "").partition(";")[0].strip()
        self.streaming = self.content_type == EVENT_STREAM_TYPE
        self.cold = headers.get("X-Cold-Start") == "true"
        self.worker: str = headers.get("X-Worker-Id", "")
        self.request_id: str = headers.get("X-Request-Id", "")
        self.timing_ms: dict[str, float] = parse_server_timing(headers.get("Server-Timing", ""))

    def body(self) -> bytes:
        """The whole answer as it came."""
        return self._response.read()

    def value(self) -> Any:
        """The whole answer, decoded: JSON's value, a stream's list of pieces, else bytes."""
        if self.streaming:
            return list(self.pieces())
        return json.loads(self.body()) if self.content_type == JSON_TYPE else self.body()

    def pieces(self) -> Iterator[Any]:
        """A stream's pieces as they come. Raises the error that ended it, if one did."""
        for event in parse_events(self._response.iter_bytes()):
            if event.name == "output":
                yield json.loads(event.data)
            elif event.name == "error":
                raise PilotflameError.from_wire(json.loads(event.data))
            elif event.name == "completed":
                return
        raise GatewayError("The stream broke off before its end.", remedy="Call again.")


class Client:
    """A connection to the gateway at `url`, or at its own unix socket `own`. A context manager."""

    def __init__(self, url: str = DEFAULT_URL, *, api_key: str = "", own: Path | None = None) -> None:
        self.url = url.rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise _bad_url(url, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _bad_url(url, "it must begin with http:// or https:// and name a host")
        self.on_loopback = is_loopback(parsed.host)
        # A proxy set for the outside world is of no use on this machine.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not self.on_loopback,
            headers=_authorization(api_key),
            transport=None if own is None else httpx.HTTPTransport(uds=str(own)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- invoking

    @contextmanager
    def call(
        self, name: str, body: bytes = b"", *, content_type: str = JSON_TYPE, timeout_s: float | None = None
    ) -> Iterator[InvokeReply]:
        """Invokes `name`; the reply is valid inside the block. Raises the error that it was answered with."""
        headers = {"Content-Type": content_type}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        # The gateway answers at the invocation's deadline at the latest, which it knows and we do not.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        with (
            self._told(),
            self._http.stream(
                "POST", _path("invoke", name), content=body, headers=headers, timeout=timeout
            ) as response,
        ):
            _check(response)
            yield InvokeReply(response)

    def invoke(self, name: str, event: Any = None, *, timeout_s: float | None = None) -> Any:
        """Invokes `name` with a JSON event and gives its answer; for a stream, the list of its pieces."""
        with self.call(name, json.dumps(event).encode(), timeout_s=timeout_s) as reply:
            return reply.value()

    # -- jobs

    def submit(self, name: str, order: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
        """Submits `{"input": …, "webhook": …, "policy": …}`; the job's id, status, and `replayed`: it was there before."""
        headers = {"Content-Type": JSON_TYPE} | ({"Idempotency-Key": key} if key else {})
        with self._told():
            # httpx writes lone surrogates as they are, which no UTF-8 can hold.
            response = self._http.post(
                _path("v2", name, "run"), content=json.dumps(order).encode(), headers=headers
            )
        _check(response)
        return self._answer(response) | {"replayed": response.headers.get("Idempotent-Replayed") == "true"}

    def job(self, name: str, job_id: str) -> dict[str, Any]:
        return self._json("GET", _job_path(name, "status", job_id))

    def jobs(self, name: str, states: Sequence[str] = (), limit: int = 100) -> list[dict[str, Any]]:
        """The newest jobs first, without their outputs."""
        params = {"status": list(states), "limit": limit}
        found: list[dict[str, Any]] = self._json("GET", _path("v2", name, "requests"), params=params)[
            "requests"
        ]
        return found

    def cancel(self, name: str, job_id: str) -> dict[str, Any]:
        """The job, CANCELLED unless it had ended."""
        return self._json("POST", _job_path(name, "cancel", job_id))

    def retry(self, name: str, job_id: str) -> dict[str, Any]:
        """The job, in the queue again: one that failed or timed out."""
        return self._json("POST", _job_path(name, "retry", job_id))

    def purge(self, name: str) -> int:
        """Cancels the jobs that wait; how many."""
        return int(self._json("POST", _path("v2", name, "purge-queue"))["removed"])

    def health(self, name: str) -> dict[str, Any]:
        """How many jobs and workers a function has, by state."""
        return self._json("GET", _path("v2", name, "health"))

    def follow(self, name: str, job_id: str, *, after: int = 0) -> Iterator[tuple[str, Any]]:
        """A job's events as they come, after piece number `after`: ("status", …), ("output", piece), and at last
        ("completed" or "error", the whole job).
        """
        headers = {"Accept": EVENT_STREAM_TYPE, "Last-Event-ID": str(after)}
        # The gateway ends it when the job ends, which it knows and we do not.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        path = _job_path(name, "stream", job_id)
        with self._told(), self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            _check(response)
            for event in parse_events(response.iter_bytes()):
                yield event.name, json.loads(event.data)
                if event.name in ("completed", "error"):
                    return
        raise GatewayError(
            "The stream broke off before its end; the job goes on.", remedy="Follow the job again, by its id."
        )

    def wait(self, name: str, job_id: str) -> dict[str, Any]:
        """The whole job, once it has ended."""
        job: dict[str, Any] = {}
        for _, job in self.follow(name, job_id, after=ALL_PIECES):  # noqa: B007  the last word counts
            pass
        return job

    def deliveries(
        self, name: str, *, job_id: str = "", states: Sequence[str] = (), limit: int = 100
    ) -> list[dict[str, Any]]:
        """The newest deliveries of a function's webhooks first."""
        params = {"state": list(states), "limit": limit} | ({"job": job_id} if job_id else {})
        found: list[dict[str, Any]] = self._json(
            "GET", _path("v1/functions", name, "webhooks"), params=params
        )["deliveries"]
        return found

    def redeliver(self, name: str, delivery_id: str) -> dict[str, Any]:
        """Sends a delivery again, under its id."""
        delivery = quote(delivery_id, safe="")
        return self._json("POST", _path("v1/functions", name, f"webhooks/{delivery}/redeliver"))

    def webhook_secret(self, name: str) -> str:
        """What receivers verify a function's webhooks with."""
        return str(self._json("GET", _path("v1/functions", name, "webhooks/secret"))["secret"])

    # -- control

    def deploy(
        self,
        folder: Path,
        *,
        overrides: Mapping[str, Any] | None = None,
        install: bool = False,
        check: bool = True,
        upload: bool | None = None,
    ) -> dict[str, Any]:
        """Deploys a folder: by its path if the gateway is on this machine, else (or with `upload`) its files."""
        if upload is None:
            upload = not self.on_loopback
        timeout = httpx.Timeout(DEPLOY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        if not upload:
            order = {"path": str(folder.resolve()), "overrides": dict(overrides or {})}
            request = {**order, "install": install, "check": check}
            return self._json("POST", "/v1/functions", json=request, timeout=timeout)
        from ..functions.code import pack  # noqa: PLC0415  only uploads read the folder here

        return self._json(
            "POST",
            "/v1/functions",
            content=pack(folder),
            headers={"Content-Type": "application/gzip"},
            params={
                "install": int(install),
                "check": int(check),
                "set": [f"{key}={value}" for key, value in (overrides or {}).items()],
            },
            timeout=timeout,
        )

    def functions(self) -> list[dict[str, Any]]:
        """The status of every function."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/functions")["functions"]
        return found

    def status(self, name: str, *, memory: bool = False) -> dict[str, Any]:
        """One function's status; with `memory`, what each of its processes holds."""
        return self._json("GET", _path("v1/functions", name), params={"memory": int(memory)})

    def delete(self, name: str) -> None:
        self._json("DELETE", _path("v1/functions", name))

    def warmup(self, name: str, workers: int = 1) -> dict[str, Any]:
        """Starts workers ahead of need, up to `workers` of them; gives how many there are."""
        found: dict[str, Any] = self._json("POST", _path("v2", name, "warmup"), params={"workers": workers})[
            "workers"
        ]
        return found

    def logs(self, name: str, *, lines: int = 100, follow: bool = False) -> Iterator[dict[str, Any]]:
        """The last lines of a function's log; with `follow`, every new one for as long as one listens."""
        timeout = httpx.Timeout(None if follow else REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        params = {"lines": lines, "follow": int(follow)}
        path = _path("v1/functions", name, "logs")
        with self._told(), self._http.stream("GET", path, params=params, timeout=timeout) as response:
            _check(response)
            for line in split_lines(response.iter_bytes()):
                if line:
                    yield json.loads(line)

    def create_key(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """A new API key as it was made, with its token as `key`: told this once."""
        return self._json("POST", "/v1/keys", json=dict(wanted))

    def keys(self) -> list[dict[str, Any]]:
        """The API keys, without what opens anything."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/keys")["keys"]
        return found

    def revoke_key(self, key_id: str) -> None:
        self._json("DELETE", _path("v1/keys", key_id))

    def set_secret(self, name: str, key: str, value: str) -> dict[str, Any]:
        """Gives `name`'s workers a secret as an environment variable, from their next activation on."""
        return self._json(
            "PUT", _path("v1/functions", name, f"secrets/{quote(key, safe='')}"), json={"value": value}
        )

    def secrets(self, name: str) -> list[str]:
        """The names of a function's secrets; their values are never told."""
        found: list[str] = self._json("GET", _path("v1/functions", name, "secrets"))["secrets"]
        return found

    def unset_secret(self, name: str, key: str) -> None:
        self._json("DELETE", _path("v1/functions", name, f"secrets/{quote(key, safe='')}"))

    def ready(self) -> bool:
        """Whether the gateway takes requests."""
        with self._told():
            return self._http.get("/readyz").is_success

    # -- beneath

    def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        with self._told():
            response = self._http.request(method, path, **request)
        _check(response)
        return self._answer(response)

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = response.json()
        except ValueError:
            raise _stranger(response) from None
        return answer

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Inside, what goes wrong on the wire is told as an error of the tree."""
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
                remedy="See whether it still runs, and call again.",
            ) from None


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines ended by a line feed. (httpx's iter_lines also splits at U+2028, which JSON may hold as it is.)"""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def parse_events(chunks: Iterable[bytes]) -> Iterator[StreamEvent]:
    """Server-sent events, comments skipped; one without its closing empty line is not an event."""
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
    """Raises what the gateway answered with, if that is an error."""
    if response.is_success:
        return
    response.read()
    try:
        wire = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise _stranger(response) from None
    raise PilotflameError.from_wire(wire)


def _stranger(response: httpx.Response) -> GatewayError:
    text = " ".join(response.text.split())[:200]
    return GatewayError(
        f"{response.request.url} answered {response.status_code} and not as a gateway does: {text!r}.",
        remedy="See whether --url (or PILOTFLAME_URL) names a pilotflame gateway.",
    )


def _bad_url(url: str, why: str) -> GatewayError:
    return GatewayError(
        f"{url!r} is not a gateway's address: {why}.", remedy=f"Write it as {DEFAULT_URL} is written."
    )


def _authorization(api_key: str) -> dict[str, str]:
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise Unauthorized(
            "What was given as the API key is none: it holds spaces, or what is no plain character.",
            remedy="Look at --api-key and PILOTFLAME_API_KEY; a key looks like pf_…",
        )
    return {"Authorization": f"Bearer {api_key}"}


def _path(before: str, name: str, after: str = "") -> str:
    return f"/{before}/{quote(name, safe='')}" + (f"/{after}" if after else "")


def _job_path(name: str, verb: str, job_id: str) -> str:
    return _path("v2", name, f"{verb}/{quote(job_id, safe='')}")
