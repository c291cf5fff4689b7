"""`make check-api`: schemathesis generates requests from /openapi.json, sends them to a real gateway and checks every response.

python infra/bench/schema.py [--examples N] [--seed N] [--least N]

Exits with 1 if a response is a 5xx, has an undescribed status or type, or does not fit its schema, or if
there were fewer than `--least` requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import schema_config
from control import Control

HANDLERS = {
    "plain": "def handler(event):\n    return event\n",
    "typed": (
        "from typing import Literal\nfrom pydantic import BaseModel, Field\n"
        "class Size(BaseModel):\n    width: int = Field(ge=1, le=4096)\n    height: int = Field(1, ge=1, le=4096)\n"
        "class Order(BaseModel):\n    text: str = Field(max_length=100)\n    sizes: list[Size] = []\n"
        "    kind: Literal['a', 'b'] = 'a'\n    weight: float | None = None\n"
        "class Answer(BaseModel):\n    length: int\n    area: int\n"
        "def handler(event: Order) -> Answer:\n"
        "    return Answer(length=len(event.text), area=sum(s.width * s.height for s in event.sizes))\n"
    ),
    "streamed": "def handler(event):\n    yield from range(3)\n",
    "batched": "import pilotflame\n@pilotflame.batch(max_size=4)\ndef handler(events):\n    return list(events)\n",
    # The function that requests may delete.
    "spare": "def handler(event):\n    return 1\n",
}
SETTINGS: dict[str, Any] = {"scale.max": 2, "scale.idle_timeout_s": 60}
START_S, STOP_S = 60.0, 20.0
CONFIG, REPORT = "schemathesis.toml", "report.har"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,unsupported_method,missing_required_header"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the gateway against its own description.")
    parser.add_argument("--examples", type=int, default=60, help="fuzzed requests of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=2000, help="the smallest number of requests")
    parser.add_argument("--phases", default="coverage,fuzzing,stateful", help="the phases of schemathesis")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        gateway(Path(folder)) as url,
    ):
        described = prepare(url, Path(folder))
        passed = check(url, Path(folder), arguments)
        return 0 if show(Path(folder) / REPORT, described, arguments.least) and passed else 1


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[str]:
    """Yield the address of a new gateway, which is drained at the end and must exit with 0."""
    serve = ["-m", "pilotflame.runtime.cli", "serve", "--json", "--port", "0", "--drain", "5", "--state-dir"]
    process = subprocess.Popen(
        [sys.executable, *serve, str(folder / "state")], stdout=subprocess.PIPE, text=True, cwd=folder,
        env={key: value for key, value in os.environ.items() if not key.startswith("PILOTFLAME_")},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        if process.wait(STOP_S) != 0:
            raise RuntimeError(f"the gateway ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def prepare(url: str, folder: Path) -> dict[str, Any]:
    """Create functions, jobs in several states, a secret and keys, so that some requests name what exists.

    Write the configuration with these names; return the paths of the document.
    """
    control = Control(url)
    for name, source in HANDLERS.items():
        (folder / name).mkdir()
        (folder / name / "handler.py").write_text(source)
        control.request(
            "POST", "/v1/functions", {"path": str(folder / name), "overrides": SETTINGS | {"name": name}}
        )
    inputs = {"plain": {"a": 1}, "typed": {"text": "x"}, "streamed": 1, "batched": 2}
    jobs = [
        control.request("POST", f"/v2/{name}/runsync", {"input": value})["id"]
        for name, value in inputs.items()
    ]
    failed = [control.request("POST", "/v2/typed/runsync", {"input": n})["id"] for n in range(8)]
    for name in inputs:
        control.request("PUT", f"/v1/functions/{name}/secrets/TOKEN", {"value": "x"})
    spare = [control.request("POST", "/cog/predictions?function=plain", {"input": n})["id"] for n in range(3)]
    described: dict[str, Any] = control.request("GET", "/openapi.json")["paths"]
    # The first key closes the gateway, so all further requests send it. The other key may be revoked.
    key = control.request("POST", "/v1/keys", {"name": "check", "scopes": ["admin"]})["key"]
    other = control.request("POST", "/v1/keys", {"name": "spare"}, key=key)["id"]
    control.close()
    names = [name for name in HANDLERS if name != "spare"]
    (folder / CONFIG).write_text(
        schema_config.text(key, other, names, jobs + spare, failed, folder / "plain")
    )
    return described


def check(url: str, folder: Path, arguments: argparse.Namespace) -> bool:
    """Run schemathesis; return True if every response was as described."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", CONFIG, "run", f"{url}/openapi.json",
        "--phases", arguments.phases, "--checks", CHECKS, "--max-examples", str(arguments.examples), "--seed", str(arguments.seed),
        "--generation-deterministic", "--continue-on-failure", "--no-color", "--warnings", "off",
        "--report", "har", "--report-har-path", REPORT,
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, check=False).returncode == 0


def show(report: Path, described: dict[str, Any], least: int) -> bool:
    """Print the number of responses by status and the operations that never succeeded; return True if there were enough."""
    found: Counter[int] = Counter()
    succeeded: set[tuple[str, str]] = set()
    patterns = sorted(described, key=lambda path: (path.count("{"), path))
    for entry in json.loads(report.read_text())["log"]["entries"]:
        status, method = entry["response"]["status"], entry["request"]["method"]
        found[status] += 1
        path = urlsplit(entry["request"]["url"]).path
        if status < 300:
            succeeded.add((method, next((one for one in patterns if _matches(one, path)), path)))
    operations = {(method.upper(), path) for path, methods in described.items() for method in methods}
    # It was read at the start.
    operations.discard(("GET", "/openapi.json"))
    never = sorted(operations - succeeded)
    codes = ", ".join(f"{status}: {count}" for status, count in sorted(found.items()))
    sys.stdout.write(
        f"{found.total()} requests to {len(operations)} operations answered as described ({codes})\n"
    )
    for method, path in never:
        sys.stdout.write(f"never succeeded: {method} {path}\n")
    return found.total() >= least


def _matches(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\\\{[^}]*\\\}", "[^/]*", re.escape(template)), path) is not None


if __name__ == "__main__":
    sys.exit(main())
