"""The contestants of `make bench-warm`: what each lets one choose, and how each is started with a choice.

Peers have their own environments in build/peers (`python infra/bench/warm_envs.py` makes them); all run the very same
handlers (functions/minilm, functions/sleep), listen on loopback only, and are ended by process id.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import servers
from control import Control
from http1 import Request
from load import load_apart
from pilotflame.runtime.commands import minilm
from servers import Server

HERE = Path(__file__).parent
APPS = HERE / "peers"
PEERS = HERE.parents[1] / "build" / "peers"
BODIES = {"minilm": {"text": minilm.TEXT}, "sleep": {"value": 7}}
HEADERS = {"Content-Type": "application/json"}
LIMIT = 32  # the largest batch that our functions say


@dataclass(frozen=True)
class Choice:
    """One setting of one contestant. Options that the contestant does not have keep their defaults."""

    name: str
    workers: int = 1
    threads: int = 1
    batch: int = LIMIT
    wait_ms: float = 0.0
    fast_queue: bool = False
    api_servers: int = 1
    way: str = ""

    def __str__(self) -> str:
        words = [f"{self.workers} worker{'s' if self.workers > 1 else ''}", f"{self.threads} threads"]
        if self.name != "pilotflame":
            words += [f"batch {self.batch}", f"wait {self.wait_ms:g} ms"]
        if self.name == "litserve":
            words += ["fast queue"] * self.fast_queue + [f"{self.api_servers} api servers"]
        return ", ".join([*words, self.way] if self.way else words)


class Contender:
    """A running contestant with one handler: its server and the request it is sent."""

    def __init__(self, choice: Choice, handler: str, server: Server, path: str, wrap: bool = False) -> None:
        self.choice, self.handler, self.server = choice, handler, server
        event = BODIES[handler]
        self.request = Request(
            server.url + path,
            body=json.dumps({"events": [event]} if wrap else event).encode(),
            headers=HEADERS,
        )

    @property
    def name(self) -> str:
        return self.choice.name

    def warm_up(self) -> None:
        """Bring every process and code path to the state in which it is measured; BentoML learns in it, too."""
        for callers in (1, 8, 32):
            load_apart(self.request, callers=callers, duration_s=0.7)


@contextmanager
def start(choice: Choice, handler: str) -> Iterator[Contender]:
    """The contestant, ready and answering."""
    with STARTERS[choice.name](choice, handler) as contender:
        contender.server.wait_answer(
            contender.server.url, contender.request.url[len(contender.server.url) :], contender.request.body
        )
        yield contender


def _given(choice: Choice, handler: str, port: int) -> dict[str, Any]:
    return {**asdict(choice), "handler": handler, "model": str(minilm.model_folder()), "port": port}


def _env() -> dict[str, str]:
    return {**minilm.OFFLINE, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(APPS)}


@contextmanager
def _litserve(choice: Choice, handler: str) -> Iterator[Contender]:
    port = servers.free_port()
    command = [sys.executable, str(APPS / "litserve_app.py"), json.dumps(_given(choice, handler, port))]
    with servers.running("litserve", command, _env()) as server:
        server.url = f"http://127.0.0.1:{port}"
        yield Contender(choice, handler, server, "/predict")


@contextmanager
def _bento(choice: Choice, handler: str) -> Iterator[Contender]:
    port = servers.free_port()
    with tempfile.TemporaryDirectory(prefix="bench-bento-") as home:
        env = {
            **_env(),
            "BENCH_WARM": json.dumps(_given(choice, handler, port)),
            "BENTOML_HOME": home,
            "BENTOML_DO_NOT_TRACK": "True",
            "PROMETHEUS_MULTIPROC_DIR": home,
        }
        command = [str(PEERS / "bentoml/bin/python"), "-m", "bentoml", "serve", "bento_app:Answers"]
        command += ["--working-dir", str(APPS), "--host", "127.0.0.1", "--port", str(port), "--quiet"]
        with servers.running("bentoml", command, env) as server:
            server.url = f"http://127.0.0.1:{port}"
            yield Contender(choice, handler, server, "/answer", wrap=True)


@contextmanager
def _ray(choice: Choice, handler: str) -> Iterator[Contender]:
    port = servers.free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        env = {**_env(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_DISABLE_USAGE": "1"}
        if choice.way == "throughput":
            env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
        if choice.way == "haproxy":
            env |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
        given = json.dumps({**_given(choice, handler, port), "folder": folder})
        command = [str(PEERS / "ray/bin/python"), str(APPS / "ray_app.py"), given]
        with servers.running("ray", command, env) as server:
            server.url = f"http://127.0.0.1:{port}"
            yield Contender(choice, handler, server, "/")


@contextmanager
def _pilotflame(choice: Choice, handler: str) -> Iterator[Contender]:
    os.environ.update(minilm.OFFLINE)
    with servers.start_pilotflame() as server:
        control = Control(server.url)
        deploy(control, handler, workers=choice.workers, threads=choice.threads)
        control.close()
        yield Contender(choice, handler, server, f"/invoke/{handler}")


STARTERS = {"pilotflame": _pilotflame, "litserve": _litserve, "bentoml": _bento, "ray": _ray}


def deploy(control: Control, handler: str, *, workers: int, threads: int = 1, **overrides: Any) -> None:
    """Deploy our function with exactly `workers` workers."""
    settings: dict[str, Any] = {"scale.min": workers, "scale.max": workers, "threads": threads, **overrides}
    if handler == "minilm":
        settings["snapshot"] = str(minilm.model_folder())
    control.deploy(str(HERE / "functions" / handler), **settings)
    control.wait_for(handler, workers=workers)
