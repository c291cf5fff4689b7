"""`make check-api`: what schemathesis makes of /openapi.json is sent to a real gateway, and every answer is checked.

python infra/bench/schema.py [--examples N] [--seed N] [--least N]

Exits with 1 if an answer was a 5xx, had a status or a type that is not described, or did not fit its schema; or if fewer
than `--least` requests were made.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    "batched": "import pilotlight\n@pilotlight.batch(max_size=4)\ndef handler(events):\n    return list(events)\n",
    "spare": "def handler(event):\n    return 1\n",  # the one that may be deleted
}
SETTINGS: dict[str, Any] = {"scale.max": 2, "scale.idle_timeout_s": 60}
START_S, STOP_S = 60.0, 20.0
COUNT = re.compile(r"(\d+) generated")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,unsupported_method,missing_required_header"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the gateway against its own description.")
    parser.add_argument("--examples", type=int, default=60, help="fuzzed requests of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=2000, help="so many requests must have been made")
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    parser.add_argument("--report", default="", help="a file for all requests and answers, as NDJSON")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        gateway(Path(folder)) as url,
    ):
        code, said = check(url, prepare(url, Path(folder)), arguments)
    found = COUNT.search(said)
    count = int(found[1]) if found is not None else 0
    if code == 0 and count < arguments.least:
        sys.stderr.write(f"only {count} requests were made, not {arguments.least}\n")
        return 1
    return 1 if code else 0


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[str]:
    """The address of a gateway of its own; drained at the end, which must succeed."""
    command = [
        sys.executable,
        "-m",
        "pilotlight.runtime.cli",
        "serve",
        "--json",
        "--port",
        "0",
        "--drain",
        "5",
    ]
    process = subprocess.Popen(
        [*command, "--state-dir", str(folder / "state")], stdout=subprocess.PIPE, text=True, cwd=folder,
        env={key: value for key, value in os.environ.items() if not key.startswith("PILOTLIGHT_")},
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


def prepare(url: str, folder: Path) -> Path:
    """Functions, jobs in several states, a secret and keys, so that made-up names are not all that is asked for."""
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
    jobs.append(control.request("POST", "/v2/typed/runsync", {"input": 1})["id"])  # fails
    control.request("PUT", "/v1/functions/plain/secrets/TOKEN", {"value": "x"})
    # The first key closes the gateway: all that follows is sent with it.
    key = control.request("POST", "/v1/keys", {"name": "check", "scopes": ["admin"]})["key"]
    control.close()
    path = folder / "schemathesis.toml"
    path.write_text(schema_config.text(key, [name for name in HANDLERS if name != "spare"], jobs))
    return path


def check(url: str, config: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """Runs schemathesis, shows what it says, and gives its exit status and its words."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run", f"{url}/openapi.json",
        "--phases", arguments.phases, "--checks", CHECKS, "--max-examples", str(arguments.examples),
        "--seed", str(arguments.seed), "--generation-deterministic", "--continue-on-failure", "--no-color", "--warnings", "off",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=config.parent
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        said.append(line)
    return process.wait(), "".join(said)


if __name__ == "__main__":
    sys.exit(main())
