"""Calls functions from an event loop: `pilotflame.AsyncClient`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import Any, Literal, Self, TypedDict, Unpack

from ....errors import BadInput, Cancelled, DeadlineExceeded, PilotflameError
from ...jobs.stored.job import JobState
from ..client.address import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE, path_of
from ..client.events import output_pieces
from ..client.request_errors import json_object
from .session import AHEAD, CONCURRENCY, RETRY_S, TIMEOUT_S, GatewaySession, Order, Reply, slots_of

# How long one request waits for the end of a job. Proxies often end a request after 60 s.
WAIT_S = 50
ANSWER_S = 30.0


class JobOptions(TypedDict, total=False):
    """The options of `submit`."""

    key: str
    """The idempotency key. A `submit` with the same key returns the same job. By default, each `submit` makes a new job."""
    priority: Literal["normal", "low", "batch"]
    execution_timeout_s: float
    ttl_s: float
    """How long the job may wait in the queue."""
    webhook: str


class AsyncClient:
    """A client of the gateway at `url`. Use it as an async context manager, or close it."""

    def __init__(
        self, url: str | None = None, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S, retry_s: float = RETRY_S
    ) -> None:  # fmt: skip
        """Without `url` and `api_key`, use the variables PILOTFLAME_URL and PILOTFLAME_API_KEY, as the commands do.

        `timeout_s` is the time for each call, with its retries, and for each `result` of a job. If the gateway cannot be
        reached, or if its answer has Retry-After, a request is repeated for at most `retry_s`. A request about a job is also
        repeated if its connection breaks, or if a proxy answers 502, 503 or 504.
        """
        self.timeout_s = timeout_s
        url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        self.session = GatewaySession(url, api_key=key, retry_s=retry_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.session.close()

    def function(self, name: str) -> AsyncFunctionHandle:
        """Return a function by its name. This sends no request."""
        return AsyncFunctionHandle(self, name)


class AsyncFunctionHandle:
    """A deployed function."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.name = name
        self._client = client

    async def call(self, event: Any = None, *, timeout_s: float | None = None) -> Any:
        """Call the function with a JSON value or bytes. Return a JSON value, bytes, or the list of the pieces of a stream.

        Raise the error of the gateway or of the function, a PilotflameError. A call is not repeated once it may have begun.
        """
        raw = isinstance(event, bytes | bytearray | memoryview)
        headers = {"Content-Type": "application/octet-stream" if raw else "application/json"}
        body = bytes(event) if raw else _json(event)
        order = Order("POST", path_of("invoke", self.name), body, headers)
        allowed_s = self._client.timeout_s if timeout_s is None else timeout_s
        return _value(await self._client.session.send(order, allowed_s))

    async def map(
        self, events: Iterable[Any] | AsyncIterable[Any], *, concurrency: int = CONCURRENCY,
        timeout_s: float | None = None, return_exceptions: bool = False,
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """Call the function with each event, `concurrency` at the same time. Yield the answers in the order of the events.

        In place of the answer of a failed call, raise its error, and end the other calls. With `return_exceptions`,
        yield the error instead. Use `contextlib.aclosing` if you may leave the loop early.
        """
        slots, room = slots_of(concurrency), asyncio.Semaphore(AHEAD * concurrency)
        calls = asyncio.Queue[asyncio.Task[Any] | None](AHEAD * concurrency + 1)

        async def begin() -> None:
            try:
                await room.acquire()
                async for event in _each(events):
                    work = self.call_in(slots, event, timeout_s, return_exceptions)
                    calls.put_nowait(asyncio.create_task(work))
                    await room.acquire()
            finally:
                calls.put_nowait(None)

        # A task reads the events, because the source may wait for an answer before it has the next event.
        beginning = asyncio.create_task(begin())
        try:
            while (call := await calls.get()) is not None:
                yield await call
                room.release()
            # Raise the error of the source.
            await beginning
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            left = [call for call in (calls.get_nowait() for _ in range(calls.qsize())) if call is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def call_in(self, slots: asyncio.Semaphore, event: Any, timeout_s: float | None, keep: bool) -> Any:
        """Call the function once one of `slots` is free. With `keep`, return its error instead of raising it."""
        async with slots:
            try:
                return await self.call(event, timeout_s=timeout_s)
            except PilotflameError as error:
                if not keep:
                    raise
                return error

    async def submit(self, event: Any = None, **options: Unpack[JobOptions]) -> AsyncJobHandle:
        """Store a job with a JSON value as its input, and return the job. The gateway runs it even if this process ends."""
        key = options.pop("key", "") or secrets.token_hex(16)
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        body = _json({"input": event, **options})
        order = Order("POST", path_of(*self._jobs), body, headers, safe=True)
        return self.job(_object(await self._client.session.send(order, self._client.timeout_s))["id"])

    def job(self, job_id: str) -> AsyncJobHandle:
        """Return a job of this function by its id. This sends no request."""
        return AsyncJobHandle(self._client, (*self._jobs, job_id))

    @property
    def _jobs(self) -> tuple[str, ...]:
        return "v1", "functions", self.name, "jobs"


class AsyncJobHandle:
    """A job. Its `id` finds it again later, in any process."""

    def __init__(self, client: AsyncClient, path: tuple[str, ...]) -> None:
        self.id = path[-1]
        self._client, self._path = client, path

    async def status(self) -> JobState:
        return JobState((await self._sent())["status"])

    async def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the job, and return its output. Raise its error, or DeadlineExceeded after `timeout_s`."""
        allowed_s = self._client.timeout_s if timeout_s is None else timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(allowed_s):
                while True:
                    job = await self._sent(f"?wait_s={WAIT_S}")
                    if JobState(job["status"]).final:
                        return _output(job)
        late = f"The job {self.id} has not ended within {allowed_s} s."
        raise DeadlineExceeded(
            late, remedy="It goes on: call result again, or cancel.", details={"job": self.id}
        )

    async def cancel(self) -> JobState:
        """Cancel the job unless it has ended, and return its state."""
        return JobState((await self._sent("/cancel", "POST"))["status"])

    async def _sent(self, end: str = "", method: str = "GET") -> dict[str, Any]:
        order = Order(method, path_of(*self._path) + end, safe=True)
        return _object(await self._client.session.send(order, WAIT_S + ANSWER_S))


async def _each(events: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "Pass JSON values: dict, list, str, finite numbers, bool, None. `call` takes bytes, too."
        raise BadInput(f"The input is not JSON: {error}.", remedy=remedy) from None


def _value(reply: Reply) -> Any:
    if reply.content_type == "text/event-stream":
        return list(output_pieces([reply.body]))
    return json.loads(reply.body) if reply.content_type == "application/json" else reply.body


def _object(reply: Reply) -> dict[str, Any]:
    return json_object(reply.url, reply.status, reply.body)


def _output(job: dict[str, Any]) -> Any:
    """Return the output of a job that has ended. Raise its error."""
    if job["status"] == JobState.COMPLETED:
        return base64.b64decode(job["output"]) if "output_type" in job else job.get("output")
    if "error" in job:
        raise PilotflameError.from_wire(job["error"])
    kind = DeadlineExceeded if job["status"] == JobState.TIMED_OUT else Cancelled
    raise kind(f"The job {job['id']} is {job['status']}.", details={"job": job["id"]})
