"""Provides a client of the gateway's HTTP interface. It raises an error of the gateway as the same exception class."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from ....errors import GatewayError, PilotflameError
from ....snapshot.sources.location import shown
from ...ground.telemetry.timeline import parse_server_timing
from .address import DEFAULT_URL, path_of
from .connection import (
    ANSWER_S,
    CONNECT_TIMEOUT_S,
    NO_TIMEOUT,
    TIMEOUT,
    GatewayConnection,
    json_of,
)
from .events import output_pieces, parse_events, split_lines

if TYPE_CHECKING:
    from ...ground.access.control_socket import ControlAddress

JSON_TYPE = "application/json"
EVENT_STREAM_TYPE = "text/event-stream"
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
        return output_pieces(self._response.iter_bytes())


class Client:
    """A client of the gateway at `url`, or behind a control socket. Use it as a context manager."""

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str = "", control: ControlAddress | None = None,
        timeout: httpx.Timeout = TIMEOUT, on_wait: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """With `on_wait`, requests wait for a gateway on this machine that is starting.

        When such a wait begins, the client calls `on_wait` with a line for the user.
        """
        self._connection = GatewayConnection(
            url, api_key=api_key, control=control, timeout=timeout, on_wait=on_wait
        )
        self.url, self.on_loopback = shown(self._connection.url), self._connection.on_loopback

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()

    @contextmanager
    def call(
        self, name: str, body: bytes = b"", *, content_type: str = JSON_TYPE, timeout_s: float | None = None
    ) -> Iterator[InvokeReply]:
        """Invoke a function, and yield the reply, which can be read only inside the block."""
        headers = {"Content-Type": content_type}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        with self._connection.stream(
            "POST", path_of("invoke", name), content=body, headers=headers
        ) as response:
            yield InvokeReply(response)

    def submit(self, name: str, request: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
        """Submit a job: `{"input": …, "webhook": …, "ttl_s": …}`. Return its id and status.

        `replayed` is True in the result if the gateway already had a job with this idempotency key.
        """
        headers = {"Content-Type": JSON_TYPE} | ({"Idempotency-Key": key} if key else {})
        # httpx's own `json=` does not escape lone surrogates, which UTF-8 cannot encode.
        response = self._connection.request(
            "POST", path_of(*jobs_of(name)), content=json.dumps(request).encode(), headers=headers
        )
        job, replayed = json_of(response), response.headers.get("Idempotent-Replayed") == "true"
        return {"id": job["id"], "status": job["status"], "replayed": replayed}

    def follow(self, name: str, job_id: str, *, after: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield a job's events as (name, data), without the first `after` pieces.

        The events are ("status", …), ("output", piece), and at the end ("completed" or "error", the whole job).
        Raise GatewayError if the stream breaks off before the end.
        """
        headers = {"Accept": EVENT_STREAM_TYPE, "Last-Event-ID": str(after)}
        with self._connection.stream(
            "GET", path_of(*jobs_of(name), job_id, "events"), headers=headers
        ) as response:
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

        The archive may list files that it does not contain. The gateway takes these files from the live revision `base`,
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
        with self._connection.stream(
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
        """Change the live revision of a function, and return its status. `how` is the last segment of the route's path, such as "restart"."""
        path = path_of("v1", "functions", name, how)
        return json_of(self._connection.request("POST", path, json=order, timeout=DEPLOY_TIMEOUT))

    def logs(self, name: str, *, lines: int = 100, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the last lines of a function's log. `query` has other parameters of the route, such as `follow`."""
        yield from self._lines(path_of("v1", "functions", name, "logs"), {"lines": lines, **query})

    def gateway_log(self, name: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield lines of the log "gateway", "audit" or "access".

        `query` has the parameters of the route. With `follow`, yield each new line until the caller stops.
        """
        yield from self._lines(path_of("v1", "logs", name), query)

    def views(self) -> Iterator[dict[str, Any]]:
        """Yield the content of the console. Then, each second, yield the functions whose entries have changed."""
        yield from self._lines(path_of("v1", "console"), {"follow": True})

    def _lines(self, path: str, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        params = {
            key: int(value) if isinstance(value, bool) else value
            for key, value in query.items()
            if value is not None
        }
        timeout = NO_TIMEOUT if query.get("follow") else TIMEOUT
        with self._connection.stream("GET", path, params=params, timeout=timeout) as response:
            yield from (json.loads(line) for line in split_lines(response.iter_bytes()) if line)

    def prefetch(self, name: str) -> dict[str, Any]:
        """Bring a function's image and weights to the gateway's machine. Return facts about them."""
        return json_of(
            self._connection.request("POST", path_of("v1", "functions", name, "prefetch"), timeout=NO_TIMEOUT)
        )

    def warm(self, name: str, *, wait_s: int, **query: Any) -> dict[str, int]:
        """Start workers of a function, and wait up to `wait_s` until they are ready. Return their number by state."""
        params, timeout = (
            query | {"wait_s": wait_s},
            httpx.Timeout(ANSWER_S + wait_s, connect=CONNECT_TIMEOUT_S),
        )
        path = path_of("v2", name, "warmup")
        return dict(
            json_of(self._connection.request("POST", path, params=params, timeout=timeout))["workers"]
        )

    # -- requests to any route; `path` holds the segments of the route's path

    def get(self, *path: str, **params: Any) -> dict[str, Any]:
        return json_of(self._connection.request("GET", path_of(*path), params=params))

    def post(self, *path: str, body: Any = None, **params: Any) -> dict[str, Any]:
        return json_of(self._connection.request("POST", path_of(*path), json=body, params=params))

    def put(self, *path: str, body: Any) -> dict[str, Any]:
        return json_of(self._connection.request("PUT", path_of(*path), json=body))

    def delete(self, *path: str) -> None:
        self._connection.request("DELETE", path_of(*path))


def jobs_of(name: str) -> tuple[str, ...]:
    """Return the segments of the path of a function's jobs."""
    return "v1", "functions", name, "jobs"
