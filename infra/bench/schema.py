"""`make check-api`: schemathesis generates requests from /openapi.json, sends them to a real gateway and checks every response.

python infra/bench/schema.py [--examples N] [--seed N] [--least N]

Exits with 1 if a response is a 5xx, has an undescribed status or type, or does not fit its schema, or if
there were fewer than `--least` requests.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from control import Control
from servers import gateway_command, running

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
STOP_S = 20.0
CONFIG, REPORT = "schemathesis.toml", "report.har"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,unsupported_method,missing_required_header"


CONFIG_TEXT = """
headers = {{ Authorization = "Bearer {key}" }}
request-timeout = 30.0
generation.database = "none"

[dictionaries.functions]
values = {functions}
[dictionaries.jobs]
values = {jobs}
[dictionaries.folders]
values = {folders}
[dictionaries.failed]
values = {failed}
[dictionaries.new]
values = ["mine", "yours-2", "~.~"]
[dictionaries.secrets]
values = ["TOKEN", "lower"]

[parameters]
"path.function" = {{ dictionary = "functions", probability = 0.7 }}
"path.name" = {{ dictionary = "functions", probability = 0.7 }}
"path.id" = {{ dictionary = "jobs", probability = 0.7 }}
"path.job" = {{ dictionary = "jobs", probability = 0.7 }}
"path.key" = {{ dictionary = "secrets", probability = 0.7 }}
"query.function" = {{ dictionary = "functions", probability = 0.7 }}
"header.X-Pilotflame-Function" = {{ dictionary = "functions", probability = 0.7 }}

# A requested deadline or hold time may pass at once, which is a described error.
[[operations]]
include-path-regex = "^/invoke/"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]

# The APIs of other platforms have these, and pilotflame refuses them.
[[operations]]
include-path-regex = "(:.verb.|:explain)$"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501]

# A followed log does not end.
[[operations]]
include-path = "/v1/functions/{{function}}/logs"
parameters = {{ "query.follow" = "0" }}

[[operations]]
include-path = "/v1/logs/{{log}}"
parameters = {{ "query.follow" = "0" }}

[[operations]]
include-path = "/v1/console"
parameters = {{ "query.follow" = "0" }}

# Only a function that nothing else uses may be deleted.
[[operations]]
include-path = "/v1/functions/{{function}}"
include-method = "DELETE"
parameters = {{ "path.function" = "spare" }}

# It pauses a function, so that the jobs of later requests would wait.
[[operations]]
include-path-regex = "/v2/repository/models/.function./unload$"
parameters = {{ "path.function" = "spare" }}

# Only failed jobs can be retried.
[[operations]]
include-path = "/v2/{{function}}/retry/{{job}}"
[operations.parameters]
"path.function" = "typed"
"path.job" = {{ dictionary = "failed", probability = 0.8 }}

# New predictions need ids that are not in use.
[[operations]]
include-path = "/cog/predictions/{{id}}"
include-method = "PUT"
[operations.parameters]
"path.id" = {{ dictionary = "new", probability = 0.7 }}
"query.function" = "plain"

# The key that sends these requests must not be revoked.
[[operations]]
include-path = "/v1/keys/{{id}}"
parameters = {{ "path.id" = "{spare_key}" }}

# Folders to deploy: mostly invalid ones, and one that is valid.
[[operations]]
include-path = "/v1/functions"
include-method = "POST"
generation.dictionaries.string = {{ dictionary = "folders", probability = 0.5 }}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the gateway against its own description.")
    parser.add_argument("--examples", type=int, default=60, help="fuzzed requests of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=int, default=2000, help="the smallest number of requests")
    parser.add_argument("--phases", default="coverage,fuzzing,stateful", help="the phases of schemathesis")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with running("pilotflame", gateway_command(state_dir=str(folder / "state"), drain_s=5)) as server:
            server.wait_line()
            prepare(server.url, folder)
            passed = check(server.url, folder, arguments)
            # The gateway must drain and exit with 0.
            passed &= server.end_alone(signal.SIGTERM, STOP_S) == 0
        return 0 if show(folder / REPORT, arguments.least) and passed else 1


def prepare(url: str, folder: Path) -> None:
    """Create functions, jobs in several states, a secret and keys, so that some requests name what exists.

    Write the configuration with these names.
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
    # Once there is an API key, the gateway refuses requests without a key. So all further requests send `key`. Schemathesis may revoke
    # only the key `other`.
    key = control.request("POST", "/v1/keys", {"name": "check", "scopes": ["admin"]})["key"]
    other = control.request("POST", "/v1/keys", {"name": "spare"}, key=key)["id"]
    control.close()
    names = [name for name in HANDLERS if name != "spare"]
    lists = {
        "functions": names, "jobs": jobs + spare, "failed": failed, "folders": [str(folder / "plain")],
    }  # fmt: skip
    values = {name: json.dumps(found) for name, found in lists.items()}
    (folder / CONFIG).write_text(CONFIG_TEXT.format(key=key, spare_key=other, **values))


def check(url: str, folder: Path, arguments: argparse.Namespace) -> bool:
    """Run schemathesis; return True if every response was as described."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", CONFIG, "run", f"{url}/openapi.json",
        "--phases", arguments.phases, "--checks", CHECKS, "--max-examples", str(arguments.examples), "--seed", str(arguments.seed),
        "--generation-deterministic", "--suppress-health-check", "filter_too_much", "--continue-on-failure", "--no-color", "--warnings", "off",
        "--report", "har", "--report-har-path", REPORT,
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, check=False).returncode == 0


def show(report: Path, least: int) -> bool:
    """Print the number of responses by status. Return True if there were enough."""
    entries = json.loads(report.read_text())["log"]["entries"]
    found = Counter(entry["response"]["status"] for entry in entries)
    codes = ", ".join(f"{status}: {count}" for status, count in sorted(found.items()))
    sys.stdout.write(f"{found.total()} requests ({codes})\n")
    return found.total() >= least


if __name__ == "__main__":
    sys.exit(main())
