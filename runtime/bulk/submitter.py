"""Asking: one line after the other as jobs of the gateway, over HTTP, with keys that make asking again harmless."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from ...errors import BadInput, BatchFailed, GatewayError, PilotflameError
from .inputs import InputLine

WAIT_MS = 90_000
ANSWER_TIMEOUT_S = WAIT_MS / 1000 + 60.0
CONNECT_TIMEOUT_S = 10.0
PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
PATIENCE_S = 60.0
"""How long nothing may succeed, while the gateway is away or refuses, before the batch is given up."""
FIRST_PATIENCE_S = 10.0
_OF_THE_LINE = frozenset({400, 409, 410, 413, 415, 422})
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT"})


class Submitter:
    """Asks a function of the gateway at `url`; an async context manager. `run` tells this batch from all others."""

    def __init__(
        self, url: str, function: str, *, api_key: str, run: str, patience_s: float = PATIENCE_S
    ) -> None:
        self._gateway = url.rstrip("/")
        self._url = f"{self._gateway}/v2/{quote(function, safe='')}/runsync?wait={WAIT_MS}"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._run = run
        self._patience_s = patience_s
        self._answered = False
        self._failing_since_s: float | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            headers=self._headers,
            trust_env=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, line: InputLine) -> bytes:
        """The line's answer as one line of JSON, or an error object. Raises what concerns all lines alike."""
        try:
            json.loads(line.text)
        except ValueError as error:
            return failure(line, BadInput(f"It is not JSON: {error}.").to_wire())
        body = b'{"input":%s,"policy":{"priority":"batch"}}' % line.text
        key, pause_s = f"batch:{self._run}:{line.number}", PAUSE_S
        while True:
            try:
                status, found = await self._post(body, key)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self._check_patience(f"{type(error).__name__}: {error}")
            else:
                if status < 300:
                    self._answered, self._failing_since_s = True, None
                    if found.get("status") in _FINAL:
                        return _answer(line, found)
                    pause_s = PAUSE_S
                    continue  # it waits its turn, or runs long: ask again, which is the same job
                wire = _wire(found, status)
                if status in _OF_THE_LINE:
                    return failure(line, wire)
                if status not in _PASSING:
                    raise PilotflameError.from_wire(wire)
                self._check_patience(str(wire.get("message", "")))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _post(self, body: bytes, key: str) -> tuple[int, dict[str, Any]]:
        if self._session is None:
            raise BatchFailed("Nothing can be asked outside the `async with`.")
        async with self._session.post(self._url, data=body, headers={"Idempotency-Key": key}) as response:
            found = json.loads(await response.read())
        if not isinstance(found, dict):
            raise ValueError(f"{self._gateway} does not answer as a gateway does")  # noqa: TRY004  as JSON's own
        return response.status, found

    def _check_patience(self, why: str) -> None:
        """Nothing succeeded just now; GatewayError if that goes on for too long."""
        now_s = time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        # An address at which nobody ever answered is more likely wrong than away for a moment.
        patience_s = self._patience_s if self._answered else min(self._patience_s, FIRST_PATIENCE_S)
        if now_s - self._failing_since_s > patience_s:
            raise GatewayError(
                f"The gateway at {self._gateway} has taken nothing for {patience_s:.0f} s: {why.rstrip('.')}.",
                remedy="See whether it runs, and its log. The same command goes on where it stopped.",
            )


def failure(line: InputLine, wire: Mapping[str, Any]) -> bytes:
    """The error object that stands in place of an answer; it names the line."""
    details = {**(wire.get("details") or {}), "line": line.number, "place": line.place}
    message = f"{line.place}: {wire.get('message', 'unknown error')}"
    return dumped({"error": {**wire, "message": message, "details": details}})


def dumped(value: Any) -> bytes:
    """JSON on one line."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say and UTF-8 cannot
        return json.dumps(value, separators=(",", ":")).encode()


def _answer(line: InputLine, found: dict[str, Any]) -> bytes:
    state = str(found["status"])
    if state != "COMPLETED":
        wire = found.get("errorDetails")
        if not isinstance(wire, dict):
            wire = {"type": state.lower(), "message": str(found.get("error") or f"The job is {state}.")}
        details = {**(wire.get("details") or {}), "job": found.get("id", "")}
        return failure(line, {**wire, "details": details})
    if kind := found.get("output_type"):
        return dumped({"content_type": kind, "base64": found.get("output", "")})
    return dumped(found.get("output"))


def _wire(found: dict[str, Any], status: int) -> dict[str, Any]:
    wire = found.get("error")
    return wire if isinstance(wire, dict) else {"message": f"The gateway answered {status}."}
