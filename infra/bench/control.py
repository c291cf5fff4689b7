"""Control of a running gateway for benchmarks: deploy, wait for zero, call and time one request."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """One answer: how long the caller waited, what it got, and what the gateway said of it."""

    ms: float
    body: Any
    cold: bool
    phases_ms: dict[str, float]
    worker: str = ""


class Control:
    """A caller with one connection kept open, as a backend would have."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def close(self) -> None:
        self._connection.close()

    def request(self, method: str, path: str, body: Any = None, *, key: str = "") -> Any:
        """JSON in, JSON out. Raises RuntimeError on a status that is no success."""
        payload = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._connection.request(method, path, payload, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        return json.loads(text)

    def deploy(self, folder: str, **overrides: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.request(
            "POST", "/v1/functions", {"path": folder, "overrides": overrides}
        )
        return found

    def status(self, name: str, *, memory: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = self.request("GET", f"/v1/functions/{name}" + ("?memory=1" if memory else ""))
        return found

    def invoke(self, name: str, event: Any) -> Reply:
        """The time runs from the first byte sent to the whole answer read."""
        body = json.dumps(event).encode()
        started = time.perf_counter()
        self._connection.request("POST", f"/invoke/{name}", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        ms = (time.perf_counter() - started) * 1e3
        if answer.status != 200:
            raise RuntimeError(f"{name}: {answer.status} {text.decode(errors='replace')}")
        phases = {
            part.partition(";dur=")[0].strip(): float(part.partition(";dur=")[2].partition(";")[0])
            for part in answer.headers.get("Server-Timing", "").split(",")
        }
        return Reply(
            ms,
            json.loads(text),
            answer.headers.get("X-Cold-Start") == "true",
            phases,
            answer.headers.get("X-Worker-Id", ""),
        )

    def post_ms(self, name: str, body: bytes, media: str) -> float:
        """Call a function with this body. Return the milliseconds until its whole answer is read."""
        started = time.perf_counter()
        self._connection.request("POST", f"/invoke/{name}", body, {"Content-Type": media})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{name}: {answer.status} {text.decode(errors='replace')}")
        return (time.perf_counter() - started) * 1e3

    def wait_for(self, name: str, *, workers: int, standby: bool | None = None) -> dict[str, Any]:
        """Wait until the function has exactly `workers` workers, all ready, and the standby is as requested."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            status = self.status(name)
            count = status["workers"]
            settled = count["ready"] == workers and not count["starting"] and not count["draining"]
            if settled and standby in (None, status["standby"]):
                return status
            time.sleep(0.02)
        raise RuntimeError(
            f"{name} did not come to {workers} workers within {WAIT_S:.0f} s: {self.status(name)}"
        )
