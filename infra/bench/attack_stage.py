"""A gateway for one attack, with two tenants and a hostile third, and the list of attacks.

`alpha` calls the function hello, and `beta` submits jobs to the function render. Both are trusted processes. The hostile
tenant has a key that may deploy only containers ("deployer"), the same for functions of any name ("stranger"), and a key that
may only call ("caller").
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import psutil
from containers import podman
from hostile.callers import packed
from servers import Server, gateway_command, running

HOSTILE = Path(__file__).resolve().parents[2] / "tests" / "hostile"
KEYS: dict[str, dict[str, Any]] = {
    "admin": {"scopes": ["admin"]},
    "alpha": {"aws": True, "functions": ["hello"]},
    "beta": {"functions": ["render", "shared"]},
    "caller": {"functions": ["evil", "shared"]},
    "deployer": {"scopes": ["deploy", "invoke"], "functions": ["evil"]},
    "stranger": {"scopes": ["deploy", "invoke", "read"]},
}
# The workers of render end at once, so that most of its jobs need a new worker.
SETTINGS: dict[str, dict[str, Any]] = {
    "hello": {}, "render": {"scale.idle_timeout_s": 0.1, "scale.max": 2}, "shared": {"scale.max": 1}
}  # fmt: skip
Act = Callable[["Stage"], str]


class Breach(Exception):
    """An attack has succeeded. The text says what it got or did."""


@dataclass(frozen=True)
class Attack:
    """An attack. `act` returns how it was refused or contained, or raises Breach. Before `act`, `prepare` runs without load.

    The hostile tenant deploys `handler`, a file in tests/hostile, with `settings` in a container, as the function evil.
    The function shared is slow, and beta may call it, too. `gateway` has settings of the gateway, and `functions` is the number
    of further functions.
    """

    tries: str
    act: Act
    handler: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    gateway: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Stage], None] = lambda _stage: None
    functions: int = 0


ATTACKS: dict[str, Attack] = {}


def code(name: str) -> str:
    return (HOSTILE / f"{name}.py").read_text()


def attack(tries: str, **fields: Any) -> Callable[[Act], Act]:
    """Add the decorated function to ATTACKS under its name."""

    def add(act: Act) -> Act:
        ATTACKS[act.__name__] = Attack(tries, act, **fields)
        return act

    return add


@dataclass
class Stage:
    """`seconds` and `jobs` are the duration of an attack and its number of queued jobs. `seen` has the results of `held`.

    An attack is contained if there are no `faults`. `text` says how, and `cells` are columns of the table.
    """

    root: Path
    engine: str
    image: str
    seconds: float
    jobs: int
    attack: Attack
    keys: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[float, int]] = field(default_factory=list)
    until_s: float = 0.0
    over: bool = False
    text: str = ""
    faults: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    canary: str = field(default_factory=lambda: f"canary-{secrets.token_hex(16)}")
    """A text that only the other tenants may know: a secret and a variable of hello have it, and so have some inputs."""
    server: Server = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.state = self.root / "state"

    @property
    def on(self) -> bool:
        """Return whether the attack goes on."""
        return time.monotonic() < self.until_s

    def start(self) -> None:
        folders = {"state_dir": str(self.state), "cache_dir": str(self.root / "cache")}
        command = gateway_command(**folders, engine=self.engine, drain_s=5, **self.attack.gateway)
        self.server = self._stack.enter_context(running("pilotflame", command))
        self.server.wait_line()

    def stop(self) -> None:
        """Stop the gateway, and remove the containers that it has left."""
        self._stack.close()
        if left := podman("ps", "-aq", f"--filter=label=pilotflame.gateway={self.state}").split():
            podman("rm", "-f", "-t", "0", *left)

    def set_up(self) -> None:
        """Make the keys, and deploy the functions of all tenants."""
        for name, fields in KEYS.items():
            self.keys[name] = self.ask("POST", "/v1/keys", {"name": name, **fields}, key="admin")["key"]
        planted = {"hello": {"env.PLANTED": self.canary}}
        for name, settings in SETTINGS.items():
            (self.root / name).mkdir()
            (self.root / name / "handler.py").write_text(code("slow" if name == "shared" else "echo"))
            body = {
                "path": str(self.root / name),
                "overrides": {"name": name, **settings, **planted.get(name, {})},
            }
            self.ask("POST", "/v1/functions", body, key="admin")
        for number in range(self.attack.functions):
            again = {"path": str(self.root / "hello"), "overrides": {"name": f"many-{number}"}}
            self.ask("POST", "/v1/functions", again, key="admin")
        secret = {"value": self.canary}
        self.ask("PUT", "/v1/functions/hello/secrets/CANARY", secret, key="admin")
        if self.attack.handler:
            status, answer = self.deploy({"handler.py": code(self.attack.handler)}, self.attack.settings)
            if status != 201:
                raise RuntimeError(f"evil was not deployed: {status} {answer}")

    def deploy(self, members: Mapping[str, str], settings: Mapping[str, str]) -> tuple[int, Any]:
        """Deploy evil with the key of the hostile tenant. `callers.packed` describes the members."""
        wanted = {"name": "evil", "image.name": self.image, **settings}
        query = urlencode(
            [("install", "1"), *(("set", f"{key}={text}") for key, text in wanted.items() if text)]
        )
        kind = {"Content-Type": "application/gzip"}
        return self.request("POST", f"/v1/functions?{query}", packed(members), key="deployer", headers=kind)

    def request(
        self, method: str, path: str, body: Any = None, *, key: str = "caller", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:  # fmt: skip
        """Return the status and the answer. A body that is no bytes is sent as JSON."""
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body)
        known = {"Authorization": f"Bearer {self.keys[key]}"} if key in self.keys else {}
        with closing(http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=60)) as connection:
            sent = {"Content-Type": "application/json", **known, **(headers or {})}
            connection.request(method, path, payload, sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def ask(self, method: str, path: str, body: Any = None, *, key: str = "caller") -> Any:
        """Return the answer of a request that must succeed."""
        status, answer = self.request(method, path, body, key=key)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {answer}")
        return answer

    def evil(self, **event: Any) -> Any:
        return self.ask("POST", "/invoke/evil", event)

    def lost(self, jobs: set[str], within_s: float) -> set[str]:
        """Return the accepted jobs of beta that are not completed in time."""
        until_s = time.monotonic() + within_s
        while jobs and time.monotonic() < until_s:
            with closing(sqlite3.connect(self.state / "jobs.sqlite3", timeout=30)) as connection:
                rows = connection.execute("SELECT id FROM jobs WHERE state = 'COMPLETED'")
                jobs = jobs - {row[0] for row in rows}
            time.sleep(0.1)
        return jobs

    def held(self) -> tuple[float, int]:
        """Return the memory of the gateway in MB, and its number of descriptors."""
        process = psutil.Process(self.server.pid)
        return process.memory_info().rss / 1e6, process.num_fds()

    def watch(self) -> None:
        """Append what `held` returns to `seen`, until `over`."""
        while not self.over:
            # During a restart there is no process.
            with contextlib.suppress(psutil.Error):
                self.seen.append(self.held())
            time.sleep(0.05)
