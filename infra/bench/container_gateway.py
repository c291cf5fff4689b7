"""A gateway with a container engine of its own, and the engine's view of its containers.

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
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import process_tree
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from containers import Engine, made_image, require_podman, running_engine
from control import Control
from servers import Server, gateway_command, running

WAIT_S = 60.0


@dataclass(frozen=True)
class ContainerGateway:
    """A running gateway, the engine that it uses, and a folder."""

    root: Path
    server: Server
    control: Control
    engine: Engine

    def delete(self, name: str) -> None:
        self.control.request("DELETE", f"/v1/functions/{name}")

    def ask(self, method: str, path: str, body: Any = None, *, missing: bool = False) -> Any:
        """Send a request to the engine. Return JSON, or None for an empty answer. With `missing`, 404 and 409 are no errors."""
        with closing(http.client.HTTPConnection("engine", timeout=WAIT_S)) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.engine.url.removeprefix("unix://"))
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status >= 400 and not (missing and answer.status in {404, 409}):
            raise RuntimeError(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        return json.loads(text) if text and answer.status < 400 else None

    def containers(self, name: str = "") -> list[dict[str, Any]]:
        """Return the containers of one function, or of all functions of the gateway, also those that have ended."""
        labels = [f"pilotflame.gateway={self.root / 'state'}"]
        labels += [f"pilotflame.function={name}"] * bool(name)
        filters = quote(json.dumps({"label": labels}))
        return list(self.ask("GET", f"/containers/json?all=1&filters={filters}") or [])

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes in the containers of a function, as the host sees them."""
        found: list[psutil.Process] = []
        for container in self.containers(name):
            facts = self.ask("GET", f"/containers/{container['Id']}/json")
            found += process_tree.tree(int(facts["State"]["Pid"]))
        return found

    def wait_no_container(self, name: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while self.containers(name):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the container of {name} was not removed within {WAIT_S:.0f} s")
            time.sleep(0.02)


@contextmanager
def container_gateway() -> Iterator[ContainerGateway]:
    """Run a gateway and its engine during the block."""
    require_podman()
    with tempfile.TemporaryDirectory(prefix="pf-bench-", dir="/tmp") as folder:
        root = Path(folder)
        with running_engine(root) as engine:
            folders = {"state_dir": str(root / "state"), "cache_dir": str(root / "cache")}
            with running("pilotflame", gateway_command(**folders, engine=engine.url)) as server:
                server.wait_line()
                yield ContainerGateway(root, server, Control(server.url), engine)


__all__ = ["ContainerGateway", "container_gateway", "made_image"]
