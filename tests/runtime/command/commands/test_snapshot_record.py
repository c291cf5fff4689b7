"""`pilotflame snapshot record`: the order in the manifest, and the errors of what cannot be recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from pilotflame.errors import (
    CacheError,
    CodeError,
    HandlerError,
    HandlerFailed,
    HandlerSetupError,
    ManifestError,
    PilotflameError,
    SnapshotError,
)
from pilotflame.runtime.cli import cli
from pilotflame.runtime.command.commands import snapshot_record
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from safetensors.torch import save_file

HEAD = """
import pilotflame, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, bias=False) for _ in range(4))

def build(context):
    with context.snapshot.skeleton():
        net = Net().eval()
    context.snapshot.restore(net)
    return net

@torch.inference_mode()
def answer(net, event):
    return net.a(net.c(torch.full((1, 4), float(event["x"])))).sum().item()
"""
KINDS = {
    "plain": """
def setup(context):
    print("setting up")
    context.state.b(torch.zeros(1, 4))

def handler(event, context):
    print("called with", event)
    return answer(context.state, event)
""",
    "async": """
import asyncio

async def setup(context):
    await asyncio.sleep(0)
    context.state.b(torch.zeros(1, 4))

async def handler(event, context):
    await asyncio.sleep(0)
    return answer(context.state, event)
""",
    "batch": """
async def setup(context):
    context.state.b(torch.zeros(1, 4))
    return {"net": context.state}

@pilotflame.batch(max_size=8)
def handler(events, context):
    assert [item.id for item in context.items] == [context.id]
    return [answer(context.state["net"], event) for event in events]
""",
    "async generator": """
async def handler(event, context):
    yield context.state.b(torch.zeros(1, 4)).sum().item()
    yield answer(context.state, event)
""",
}
Record = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A function's folder with weights of four layers: its answer uses the third, then the first."""
    weights = tmp_path / "function" / "weights"
    weights.mkdir(parents=True)
    save_file({f"{name}.weight": torch.rand(4, 4) for name in "abcd"}, weights / "model.safetensors")
    create(weights).write(weights / MANIFEST_NAME)
    (tmp_path / "function" / "pilotflame.toml").write_text('snapshot = "weights"\n')
    (tmp_path / "function" / "test_input.json").write_text('{"x": 1}')
    return tmp_path / "function"


def record(folder: Path, *arguments: object) -> Result:
    return CliRunner().invoke(cli, ["snapshot", "record", str(folder), *map(str, arguments)])


def refusal(done: Result, kind: type[PilotflameError]) -> str:
    assert done.exit_code == 1
    assert isinstance(done.exception, kind), done.exception
    return str(done.exception)


@pytest.mark.parametrize("kind", ["async", "batch", "async generator"])
def test_the_order_is_recorded_and_the_digest_stays(
    folder: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "handler.py").write_text(HEAD + KINDS[kind])
    before = Manifest.read(folder / "weights")
    there = sorted(path.name for path in folder.rglob("*"))
    done = record(folder)
    assert done.exit_code == 0, done.exception
    touched = Manifest.read(folder / "weights")
    assert touched.first_touch == ("b.weight", "c.weight", "a.weight")
    assert touched.digest == before.digest
    assert touched.provenance == before.provenance
    assert "3 of 4 tensors were touched, first b.weight, c.weight, a.weight" in done.stdout
    assert "1 were not: d.weight" in done.stdout
    assert sorted(path.name for path in folder.rglob("*")) == there
    said = capfd.readouterr()
    assert ("called with {'x': 1}" in said.err) == (kind == "plain")
    assert "called with" not in said.out


def test_each_of_several_snapshots_gets_its_order(folder: Path) -> None:
    for name, tensors in (("base", "abd"), ("style", "c"), ("spare", "e")):
        (folder / name).mkdir()
        save_file({f"{one}.weight": torch.rand(4, 4) for one in tensors}, folder / name / "model.safetensors")
        create(folder / name).write(folder / name / MANIFEST_NAME)
    (folder / "pilotflame.toml").write_text("[snapshots]\n" + "".join(f'{name} = "{name}"\n' for name in ("base", "style", "spare")))  # fmt: skip
    several = HEAD.replace("context.snapshot.", "context.snapshots.").replace("(net)\n    return", '(net, ignore={"spare": ["."]})\n    return')  # fmt: skip
    (folder / "handler.py").write_text(several + KINDS["plain"])
    spare = (folder / "spare" / MANIFEST_NAME).read_bytes()
    done = record(folder)
    assert done.exit_code == 0, done.exception
    assert "base: 2 of 3 tensors were touched, first b.weight, a.weight\n1 were not: d.weight" in done.stdout
    assert "style: 1 of 1 tensors were touched, first c.weight\n0 were not\n" in done.stdout
    assert "spare: 0 of 1 tensors were touched\n1 were not: e.weight" in done.stdout
    assert Manifest.read(folder / "base").first_touch == ("b.weight", "a.weight")
    assert Manifest.read(folder / "style").first_touch == ("c.weight",)
    assert (folder / "spare" / MANIFEST_NAME).read_bytes() == spare
    # Adapters are not recorded, because they are fetched whole.
    done = record(folder, "--set", "adapters.one=s3://bucket/one", "--json")
    assert done.exit_code == 0, done.exception
    assert list(json.loads(done.stdout)["snapshots"]) == ["base", "style", "spare"]
    refused = refusal(record(folder, "--set", "snapshots.style=s3://bucket/style"), SnapshotError)
    assert "The snapshot 'style' of" in refused
    assert "set `snapshots.style` to weights/" in refused


def test_another_input_and_json(folder: Path, tmp_path: Path) -> None:
    (folder / "handler.py").write_text(
        f"{HEAD}\ndef handler(event, context):\n    return getattr(context.state, event)(torch.zeros(1, 4)).sum().item()\n"
    )
    (tmp_path / "event.json").write_text('"d"')
    done = record(folder, "--input", tmp_path / "event.json", "--json")
    assert done.stdout.count("\n") == 1
    manifest = Manifest.read(folder / "weights")
    assert json.loads(done.stdout) == {
        "manifest": str(folder / "weights" / MANIFEST_NAME), "digest": manifest.digest, "touched": 1,
        "first": ["d.weight"], "never": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "kind", "named"),
    [
        ("def handler(event, context):\n    return 1 / 0\n", HandlerFailed, "ZeroDivisionError"),
        ("def setup(context):\n    raise KeyError('absent')\ndef handler(event): ...\n", HandlerSetupError, "absent"),
        ("def handler(event):\n    return 1\n", SnapshotError, "touched no tensor"),
        ("def handler(event):\n    import os\n    os._exit(3)\n", HandlerError, "without a result"),
    ],
    ids=["handler", "setup", "nothing", "death"],
)  # fmt: skip
def test_an_error_is_reported_and_nothing_is_written(
    folder: Path, body: str, kind: type[PilotflameError], named: str
) -> None:
    (folder / "handler.py").write_text(HEAD + body)
    before = (folder / "weights" / MANIFEST_NAME).read_bytes()
    assert named in refusal(record(folder), kind)
    assert (folder / "weights" / MANIFEST_NAME).read_bytes() == before


def test_errors_are_reported_before_the_function_runs(folder: Path) -> None:
    (folder / "handler.py").write_text("raise SystemExit('imported')\n")
    refused = refusal(record(folder, "--snapshot", "s3://bucket/models"), SnapshotError)
    assert "pilotflame snapshot pull s3://bucket/models" in refused
    assert "nowhere" in refusal(record(folder, "--snapshot", folder / "nowhere"), SnapshotError)
    (folder / "test_input.json").unlink()
    assert "--input" in refusal(record(folder), CodeError)
    (folder / "weights" / MANIFEST_NAME).unlink()
    assert "pilotflame snapshot create" in refusal(record(folder), ManifestError)
    (folder / "pilotflame.toml").write_text("")
    assert "has no snapshot" in refusal(record(folder), SnapshotError)


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"),
    reason="root may write everywhere, unless setpriv is there",
)
def test_a_read_only_folder_is_an_error(folder: Path) -> None:
    (folder / "handler.py").write_text("raise SystemExit('imported')\n")
    (folder / "weights").chmod(0o555)
    bound = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*bound, sys.executable, "-m", "pilotflame.runtime.cli", "snapshot", "record", str(folder)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    (folder / "weights").chmod(0o755)
    assert done.returncode == 1
    assert "read-only" in done.stderr
    assert str(folder / "weights") in done.stderr


def test_a_failed_write_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Manifest, path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(snapshot_record, "_orders", lambda *given: {"": ["a.weight"]})
    monkeypatch.setattr(Manifest, "write", refuse)
    assert "Read-only file system" in refusal(record(folder), CacheError)
