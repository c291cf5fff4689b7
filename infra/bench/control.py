"""Control of a running gateway for benchmarks: deploy, wait for zero, call and time one request."""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servers import Server, start_pilotflame

WAIT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """One answer, how long the caller waited for it, and what its headers report."""

    ms: float
    body: Any
    cold: bool
    worker: str = ""


class Control:
    """A caller with one connection, which stays open between requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def close(self) -> None:
        self._connection.close()

    def request(self, method: str, path: str, body: Any = None, *, key: str = "") -> Any:
        """Send JSON and return JSON. Raise RuntimeError if the request fails."""
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

    def deploy_code(self, name: str, handler: str, **overrides: Any) -> None:
        """Deploy a function from the text of its handler.py."""
        with tempfile.TemporaryDirectory(prefix="pilotflame-bench-") as folder:
            (Path(folder) / "handler.py").write_text(handler)
            self.deploy(folder, name=name, **overrides)

    def invoke(self, name: str, event: Any) -> Reply:
        """Call a function, and decode its answer as JSON."""
        reply = self.post(name, json.dumps(event).encode(), "application/json")
        return replace(reply, body=json.loads(reply.body))

    def post(self, name: str, body: bytes, media: str) -> Reply:
        """Call a function. The time ends when the whole answer is read."""
        started = time.perf_counter()
        self._connection.request("POST", f"/invoke/{name}", body, {"Content-Type": media})
        answer = self._connection.getresponse()
        text = answer.read()
        ms = (time.perf_counter() - started) * 1e3
        if answer.status != 200:
            raise RuntimeError(f"{name}: {answer.status} {text.decode(errors='replace')}")
        cold, worker = answer.headers.get("X-Cold-Start") == "true", answer.headers.get("X-Worker-Id", "")
        return Reply(ms, text, cold, worker)

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


@contextmanager
def gateway(env: Mapping[str, str] | None = None) -> Iterator[tuple[Server, Control]]:
    """Run a gateway during the block, with a caller."""
    with start_pilotflame(env) as server, closing(Control(server.url)) as control:
        yield server, control
