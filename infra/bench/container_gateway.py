"""A gateway with a container engine of its own, for benchmarks and soaks, and the engine's view of its containers.

The engine is podman's service with runc, on its own socket. The images come from the tests (tests/containers.py).
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from containers import Engine, made_image, require_podman, running_engine
from control import Control
from servers import Server

WAIT_S = 60.0
WORKER = "pilotflame: worker"
GATEWAY = """
import json, sys
from pathlib import Path
from pilotflame.runtime.main import run
from pilotflame.runtime.settings.gateway_settings import GatewaySettings

run(
    GatewaySettings(port=0, state_dir=Path(sys.argv[1]), cache_dir=Path(sys.argv[2]), engine=sys.argv[3]),
    on_listening=lambda url: print(json.dumps({"url": url}), flush=True),
)
"""


class EngineClient:
    """Requests to the engine's socket, on one connection each."""

    def __init__(self, engine: Engine) -> None:
        self._path = engine.url.removeprefix("unix://")

    def request(self, method: str, path: str, body: Any = None, *, missing: bool = False) -> Any:
        """JSON in, JSON out; None for an empty answer. With `missing`, 404 and 409 are no errors."""
        connection = http.client.HTTPConnection("engine", timeout=WAIT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(self._path)
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 400 and not (missing and answer.status in {404, 409}):
            raise RuntimeError(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        return json.loads(text) if text and answer.status < 400 else None

    def containers(self, **labels: str) -> list[dict[str, Any]]:
        """The containers with these labels of ours, those that have ended too."""
        named = [f"pilotflame.{name}={value}" for name, value in labels.items()]
        filters = quote(json.dumps({"label": named}))
        return list(self.request("GET", f"/containers/json?all=1&filters={filters}") or [])


@dataclass(frozen=True)
class Place:
    """A running gateway, the engine that it uses, and a folder for what is deployed to it."""

    root: Path
    server: Server
    control: Control
    engine: Engine
    client: EngineClient

    @property
    def state(self) -> Path:
        return self.root / "state"

    def deploy(self, name: str, handler: str, **settings: Any) -> str:
        folder = self.root / "functions" / name
        folder.mkdir(parents=True)
        (folder / "handler.py").write_text(handler)
        self.control.deploy(str(folder), name=name, **settings)
        return name

    def delete(self, name: str) -> None:
        self.control.request("DELETE", f"/v1/functions/{name}")

    def containers(self, name: str = "") -> list[dict[str, Any]]:
        """The containers of one function, or of all functions of the gateway."""
        function = {"function": name} if name else {}
        return self.client.containers(gateway=str(self.state), **function)

    def processes(self, name: str) -> list[psutil.Process]:
        """All processes in the containers of a function, as the host sees them."""
        found: list[psutil.Process] = []
        for container in self.containers(name):
            facts = self.client.request("GET", f"/containers/{container['Id']}/json")
            first = psutil.Process(int(facts["State"]["Pid"]))
            found += [first, *first.children(recursive=True)]
        return found

    def workers(self, name: str) -> list[psutil.Process]:
        """The workers among them. Without any, a figure of their memory would say nothing: raises RuntimeError."""
        titles = {one: " ".join(one.cmdline()).strip() for one in self.processes(name)}
        found = [one for one, title in titles.items() if title.startswith(WORKER)]
        if not found:
            raise RuntimeError(
                f"no process of {name} is a worker: {', '.join(titles.values()) or 'none at all'}"
            )
        return found

    def wait_no_container(self, name: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while self.containers(name):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the container of {name} was not removed within {WAIT_S:.0f} s")
            time.sleep(0.02)


@contextmanager
def container_gateway(environ: dict[str, str] | None = None) -> Iterator[Place]:
    """A gateway and its engine; both are gone after the block."""
    require_podman()
    with tempfile.TemporaryDirectory(prefix="pf-bench-", dir="/tmp") as folder:
        root = Path(folder)
        with running_engine(root) as engine:
            command = [
                sys.executable, "-c", GATEWAY, str(root / "state"), str(root / "cache"), engine.url,
            ]  # fmt: skip
            server = Server("pilotflame", command, root / "gateway.log", environ)
            try:
                server.wait_line()
                yield Place(root, server, Control(server.url), engine, EngineClient(engine))
            finally:
                server.stop()


__all__ = ["EngineClient", "Place", "container_gateway", "made_image"]
