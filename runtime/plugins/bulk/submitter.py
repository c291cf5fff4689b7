"""Runs lines as jobs of a gateway, many at a time, and writes their answers in order.

Each line has an idempotency key, so that a retry does not run it twice. The other commands use httpx, but this module
uses aiohttp: with 64 requests in flight on two cores, aiohttp sends 1,000 requests a second, and httpx sends 140.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from ....errors import BadInput, GatewayError, PilotflameError
from ...command.client.address import authorization, proxy_of, trusted_authorities
from ...command.client.request_errors import answered
from .inputs import InputLine
from .journal import Journal

# An answer waits in memory until the answers of all earlier lines are written. If n lines may be in flight, at most
# AHEAD * n started lines may lack a written answer.
AHEAD = 8
READ_LINES = 512
READ_BYTES = 4 << 20
WAIT_S = 90
ANSWER_TIMEOUT_S = WAIT_S + 60.0
CONNECT_TIMEOUT_S = 10.0
PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
# The batch fails if every request has failed for PATIENCE_S.
PATIENCE_S = 60.0
# Until the first request succeeds, this limit applies: the URL of a gateway that never answered is probably wrong.
FIRST_PATIENCE_S = 10.0
_ERRORS_OF_LINE = frozenset({400, 409, 410, 413, 415, 422})
_TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})
_FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT"})


class Submitter:
    """Submits lines as jobs of one function, over connections that are closed at the end of `async with`."""

    def __init__(
        self, url: str, function: str, *, api_key: str, run: str, patience_s: float = PATIENCE_S
    ) -> None:
        """`run` is the batch's id, which it keeps when it is resumed.

        The batch fails after every request has failed for `patience_s` seconds.
        """
        self._gateway = url.rstrip("/")
        self._url = f"{self._gateway}/v1/functions/{quote(function, safe='')}/jobs?wait_s={WAIT_S}"
        self._run = run
        self._patience_s = patience_s
        self._allowed_s = min(patience_s, FIRST_PATIENCE_S)
        """The batch fails after every request has failed for this time."""
        self._failing_since_s: float | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trusted_authorities(url) or True),
            timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Content-Type": "application/json", **authorization(api_key, url)},
            proxy=proxy_of(url),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def answer(self, line: InputLine) -> bytes:
        """Run a line as a job, and return its answer as JSON without line breaks.

        If the line fails, the answer is an error object. Raise a PilotflameError for a failure that concerns all lines.
        """
        try:
            json.loads(line.text)
        except ValueError as error:
            return _failure(line, BadInput(f"It is not JSON: {error}.").to_wire())
        body = b'{"input":%s,"priority":"batch"}' % line.text
        key, pause_s = f"batch:{self._run}:{line.number}", PAUSE_S
        while True:
            try:
                status, reply = await self._post(body, key)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self._check_patience(f"{type(error).__name__}: {error}")
            else:
                if status < 300:
                    self._allowed_s, self._failing_since_s = self._patience_s, None
                    if reply.get("status") in _FINAL:
                        return _answer(line, reply)
                    # The job is still queued or running. The next request has the same key, so it waits for this job.
                    pause_s = PAUSE_S
                    continue
                wire = reply.get("error")
                if not isinstance(wire, dict):
                    wire = {"message": f"The gateway answered {status}."}
                if status in _ERRORS_OF_LINE:
                    return _failure(line, wire)
                if status not in _TEMPORARY:
                    raise PilotflameError.from_wire(wire)
                self._check_patience(str(wire.get("message", "")))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _post(self, body: bytes, key: str) -> tuple[int, dict[str, Any]]:
        async with self._session.post(
            self._url, data=body, headers={"Idempotency-Key": key}, allow_redirects=False
        ) as response:
            if target := response.headers.get("Location") if response.status // 100 == 3 else None:
                raise answered(self._gateway, response.status, b"", target)
            reply = json.loads(await response.read())
        if not isinstance(reply, dict):
            # The caller already catches ValueError, which `json.loads` raises for invalid JSON.
            raise ValueError(f"{self._gateway} does not answer as a gateway does")  # noqa: TRY004
        return response.status, reply

    def _check_patience(self, why: str) -> None:
        """Record that a request failed. Raise GatewayError if every request has failed for `_allowed_s` seconds."""
        now_s = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s > self._allowed_s:
            raise GatewayError(
                f"{self._gateway} took nothing for {self._allowed_s:.0f} s: {why.rstrip('.')}.",
                remedy="Check that it runs, and see its log. The same command continues where it stopped.",
            )


def _failure(line: InputLine, wire: Mapping[str, Any]) -> bytes:
    """Return the error object that is written in place of an answer to `line`. The error message names the line."""
    details = {**(wire.get("details") or {}), "input_line": line.number, "place": line.place}
    message = f"{line.place}: {wire.get('message', 'unknown error')}"
    return dumped({"error": {**wire, "message": message, "details": details}})


def dumped(value: Any) -> bytes:
    """Return `value` as JSON without line breaks."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # A string contains a lone surrogate. UTF-8 cannot encode it, but JSON can escape it.
        return json.dumps(value, separators=(",", ":")).encode()


def _answer(line: InputLine, job: dict[str, Any]) -> bytes:
    state = str(job["status"])
    if state != "COMPLETED":
        wire: dict[str, Any] = job.get("error") or {"type": state.lower(), "message": f"The job is {state}."}
        details = {**(wire.get("details") or {}), "job": job.get("id", "")}
        return _failure(line, {**wire, "details": details})
    if kind := job.get("output_type"):
        return dumped({"content_type": kind, "base64": job.get("output", "")})
    return dumped(job.get("output"))


# -- many lines


async def run_in_order(
    lines: Iterator[InputLine],
    answer: Callable[[InputLine], Awaitable[bytes]],
    journal: Journal,
    *,
    max_in_flight: int,
    written: Callable[[InputLine], None],
) -> None:
    """Call `answer` with each line, up to `max_in_flight` at a time, and append the answers to the journal.

    The answers are appended in the order of the lines. After each appended answer, call `written` with the
    answer's line. An error that `answer` raises concerns all lines, so it ends the run and is raised here. Answers
    already appended stay.
    """
    in_flight = asyncio.Semaphore(max_in_flight)
    # Limits the lines that are started and whose answers are not yet written.
    unwritten = asyncio.Semaphore(AHEAD * max_in_flight)
    answers: dict[int, tuple[InputLine, bytes]] = {}

    async def run(line: InputLine) -> None:
        try:
            answers[line.number] = line, await answer(line)
        finally:
            in_flight.release()
        # Write all answers up to the first one that is missing.
        while (found := answers.pop(journal.done + 1, None)) is not None:
            journal.append(found[1])
            unwritten.release()
            written(found[0])

    try:
        async with asyncio.TaskGroup() as tasks:
            while batch := await asyncio.to_thread(_read, lines):
                for line in batch:
                    await unwritten.acquire()
                    await in_flight.acquire()
                    tasks.create_task(run(line))
    except* (PilotflameError, OSError) as group:
        raise group.exceptions[0] from None


def _read(lines: Iterator[InputLine]) -> list[InputLine]:
    """Return the next READ_LINES lines, or fewer lines once they reach READ_BYTES together. Blocks."""
    found: list[InputLine] = []
    size_bytes = 0
    for line in itertools.islice(lines, READ_LINES):
        found.append(line)
        size_bytes += len(line.text)
        if size_bytes >= READ_BYTES:
            break
    return found
