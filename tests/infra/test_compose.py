"""compose.yaml under podman: gateway, object storage and Prometheus, from images made on this machine.

Grafana is left out: its image cannot be made here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from containers import IMAGE, PODMAN, podman, require_podman
from local_images import ROOT, base_image, gateway_image, program_image

T = TypeVar("T")

PROMETHEUS = Path(os.environ.get("PROMETHEUS") or shutil.which("prometheus") or "/missing")
GET = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode())"
LIMIT_S = 60

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not PROMETHEUS.exists(), reason="prometheus is not here; .ci/run fetches it (PROMETHEUS)"
    ),
]


class Stack:
    """The services of compose.yaml and compose.local.yaml, in a copy of infra/."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.name = f"pf-{os.getpid()}"
        self._folder, self._environ = folder / "compose", environ
        wrapper = folder / "podman"
        wrapper.write_text(f'#!/bin/sh\nexec {" ".join(PODMAN)} "$@"\n')
        wrapper.chmod(0o755)
        files = ("-f", "compose.yaml", "-f", "compose.local.yaml")
        self._command = (
            str(Path(sys.executable).with_name("podman-compose")), "--podman-path", str(wrapper),
            "--in-pod", "false", "-p", self.name, *files,
        )  # fmt: skip

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], cwd=self._folder, env={**os.environ, **self._environ},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write_key(self) -> None:
        """Make the operator's key, and the key with which Prometheus reads the metrics, as docs/operations.md says."""
        create = ("run", "--rm", "--no-deps", "-T", "gateway", "keys", "create")
        self.compose(*create, "laptop", "--scope", "admin")
        key = self.compose(*create, "prometheus", "--scope", "read")
        assert key.startswith("pf_")
        (self._folder / "metrics.key").write_text(key)

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"

    def execute(self, *command: str, **environ: str) -> str:
        """Run a command in the gateway's container."""
        given = [word for name, value in environ.items() for word in ("-e", f"{name}={value}")]
        return podman("exec", *given, self.container("gateway"), *command)

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the result of a query to Prometheus."""
        url = f"http://prometheus:9090/api/v1/query?query={quote(query)}"
        return list(json.loads(self.execute("python", "-c", GET, url))["data"]["result"])

    def healthy(self) -> bool:
        """Run the health check of the gateway. The other services' checks need programs that only their own images have."""
        command = [*PODMAN, "healthcheck", "run", self.container("gateway")]
        return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0

    def _logs(self) -> str:
        command = [*PODMAN, "logs", self.container("gateway")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        return f"the gateway printed: {done.stdout}{done.stderr}"

    def until(self, condition: Callable[[], T], what: str) -> T:
        deadline_s = time.monotonic() + LIMIT_S
        while not (found := condition()):
            assert time.monotonic() < deadline_s, f"never came: {what}; {self._logs()}"
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require_podman()
    folder = tmp_path_factory.mktemp("infra")
    shutil.copytree(
        ROOT / "infra", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("bench", "*.py")
    )
    config = folder / "compose/prometheus.yml"
    config.write_text(config.read_text().replace("scrape_interval: 15s", "scrape_interval: 1s"))
    (folder / "compose/metrics.key").touch()
    (folder / "hosts").write_text("127.0.0.1 localhost gateway prometheus storage\n")
    tag = f"{IMAGE}-gateway:{os.getpid()}"
    gateway_image(tag)
    images = {
        "GATEWAY_IMAGE": tag,
        "PYTHON_IMAGE": base_image(),
        "PROMETHEUS_IMAGE": program_image(PROMETHEUS),
        "HOSTS": str(folder / "hosts"),
        "SITE_PACKAGES": sysconfig.get_path("purelib"),
    }
    stack = Stack(folder, images)
    try:
        stack.write_key()
        stack.compose("up", "-d", "--no-build")
        yield stack
    finally:
        stack.compose("down", "-v", "-t", "5")
        podman("rmi", tag)


def test_the_gateway_is_healthy_and_reaches_object_storage(stack: Stack) -> None:
    stack.until(stack.healthy, "a healthy gateway")
    assert "ListAllMyBucketsResult" in stack.execute("python", "-c", GET, "http://storage:8333/")


def test_the_gateway_serves_as_no_root_user_on_a_read_only_root(stack: Stack) -> None:
    stack.until(stack.healthy, "a healthy gateway")
    (described,) = json.loads(podman("inspect", stack.container("gateway")))
    assert described["Config"]["User"] == "10001:10001"
    assert described["HostConfig"]["ReadonlyRootfs"]
    assert described["EffectiveCaps"] in (None, [])
    key = stack.execute("pilotflame", "keys", "create", "deployer", "--scope", "admin")
    stack.execute("pilotflame", "init", "/tmp/greeter", "--template", "hello")
    stack.execute("pilotflame", "deploy", "/tmp/greeter", "--upload", PILOTFLAME_API_KEY=key)
    answer = stack.execute("pilotflame", "invoke", "greeter", '{"name": "Ada"}', PILOTFLAME_API_KEY=key)
    assert "Ada" in answer


def test_prometheus_scrapes_the_gateway_and_has_the_rules(stack: Stack) -> None:
    (up,) = stack.until(lambda: stack.query('up{job="pilotflame"} == 1'), "a successful scrape")
    assert up["metric"]["instance"] == "gateway:8600"
    assert stack.query("pilotflame_job_store_up")[0]["value"][1] == "1"
    rules = json.loads(stack.execute("python", "-c", GET, "http://prometheus:9090/api/v1/rules"))
    names = [rule["name"] for group in rules["data"]["groups"] for rule in group["rules"]]
    assert "PilotflameDown" in names


def test_the_gateway_drains_when_it_is_stopped(stack: Stack) -> None:
    stack.until(stack.healthy, "a healthy gateway")
    stack.compose("stop", "gateway")
    (described,) = json.loads(podman("inspect", stack.container("gateway")))
    assert described["State"]["ExitCode"] == 0
