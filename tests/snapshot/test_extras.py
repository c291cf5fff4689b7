"""What users read if an optional package is missing. A package that is installed later is found without a restart."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live import failure, gateway_process
from pilotflame.snapshot.extras import missing

ECHO = "def handler(event):\n    return event\n"
BOTO = ("boto3", "botocore", "s3transfer")
# Python runs this at its start. It hides the packages in $HIDDEN that the tests' environment has, but not those in `later`.
HIDES = """
import importlib.machinery, os
real, hidden = importlib.machinery.PathFinder.find_spec, os.environ["HIDDEN"].split()
def find_spec(name, path=None, target=None):
    spec = real(name, path, target)
    away = spec is not None and name.partition(".")[0] in hidden and "site-packages" in str(spec.origin)
    return None if away else spec
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


class Machine:
    """An environment without some packages, which can be installed later."""

    def __init__(self, root: Path, hidden: tuple[str, ...]) -> None:
        self._later = root / "later"
        self._later.mkdir()
        (root / "hides").mkdir()
        (root / "hides" / "sitecustomize.py").write_text(HIDES)
        self.environ = {
            "PYTHONPATH": f"{root / 'hides'}{os.pathsep}{self._later}", "HIDDEN": " ".join(hidden),
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "eu-central-1",
        }  # fmt: skip

    def install(self, *packages: str) -> None:
        for package in packages:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            (self._later / package).symlink_to(Path(spec.origin).parent)


async def test_boto3_is_missed_in_a_sentence_and_found_once_it_is_installed(state, tmp_path: Path):
    machine = Machine(tmp_path, BOTO)
    source = [{"type": "sqs", "queue": "http://127.0.0.1:1/queue"}]
    environ = {**machine.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}
    async with gateway_process(state, environ=environ) as gateway:
        for settings, what in (
            ({"snapshot": "s3://bucket/prefix"}, "S3"),
            ({"source": source}, "A [[source]]"),
        ):
            error = failure(await gateway.send(ECHO, settings, name="stored"))
            assert (error["status"], error["type"]) == (422, "package_missing")
            assert error["message"].startswith(what)
            assert "needs boto3, which is not installed" in error["message"]
            assert "pip install 'pilotflame[s3]'" in error["remedy"]
        machine.install(*BOTO)
        assert (await gateway.send(ECHO, {"source": source}, name="stored")).status_code == 201
        error = failure(await gateway.send(ECHO, {"snapshot": "s3://bucket/prefix"}, name="stored"))
        assert error["type"] != "package_missing"


async def test_a_source_that_lost_boto3_says_so_in_the_log(state, tmp_path: Path):
    source = [{"type": "sqs", "queue": "http://127.0.0.1:1/queue"}]
    async with gateway_process(state) as gateway:
        await gateway.deploy(ECHO, {"source": source}, name="fed")
        assert gateway.process is not None
        gateway.process.terminate()
        await gateway.process.wait()
    async with gateway_process(state, environ=Machine(tmp_path, BOTO).environ) as gateway:
        line = await gateway.function("fed").logged("needs boto3, which is not installed")
        assert "pip install" in line["text"]


@pytest.mark.parametrize("use", ["skeleton()", "restore(None)", "open()"])
def test_a_handler_that_restores_without_torch_reads_what_to_install(tmp_path: Path, use: str):
    machine = Machine(tmp_path, ("torch",))
    code = f"from pathlib import Path\nfrom pilotflame.snapshot.handle import Snapshot\nSnapshot(Path('x'), None).{use}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **machine.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "PackageMissing: context.snapshot needs torch, which is not installed" in done.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("snapshot", "convert", "model.pt", "out"), "The conversion needs torch"),
        (("snapshot", "inspect", "s3://bucket/prefix"), "S3 needs boto3"),
    ],
)
def test_commands_miss_packages_in_one_line(tmp_path: Path, arguments: tuple[str, ...], what: str):
    machine = Machine(tmp_path, (*BOTO, "torch", "safetensors", "numpy"))
    (tmp_path / "model.pt").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pilotflame.runtime.cli", *arguments],
        cwd=tmp_path, env={**os.environ, **machine.environ}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {what}"), done.stderr
    assert done.stderr.count("\n") == 1
    done = subprocess.run(
        [sys.executable, "-m", "pilotflame.runtime.cli", *arguments, "--json"],
        cwd=tmp_path, env={**os.environ, **machine.environ}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert json.loads(done.stderr)["error"]["type"] == "package_missing"


def test_a_package_that_no_extra_brings_is_named() -> None:
    error = missing("A [[source]] of type 'bus'", "aiobus")
    assert (error.remedy.partition(" with ")[0], error.details["extra"]) == ("Run `pip install aiobus`", "")
