"""The command bench: its table, its line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fault_server import FaultServer
from pilotflame.runtime.cli import cli
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pulling import make


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    made = make(tmp_path).model_copy(update={"first_touch": ("t5",)})
    made.write(tmp_path / MANIFEST_NAME)
    return made


def test_the_table_says_what_was_measured(manifest: Manifest, tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        done = CliRunner().invoke(cli, ["snapshot", "bench", server.url])
    assert done.exit_code == 0, done.output
    for text in ("first round", "median of the other 2", "rate", "share of the ceiling", "first tensor after",
                 "settled at", "on a kept connection", "first tensor: t5, 128.0 KiB, 12.5%", "order recorded",
                 "8 bare sockets"):  # fmt: skip
        assert text in done.stdout


def test_json_is_one_line(manifest: Manifest, tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        done = CliRunner().invoke(
            cli, ["snapshot", "bench", server.url, "--rounds", "2", "--connections", "3", "--json"]
        )
    assert done.stdout.count("\n") == 1
    facts = json.loads(done.stdout)
    assert (facts["digest"], facts["bytes"], facts["connections"]) == (
        manifest.digest,
        manifest.total_bytes,
        3,
    )
    assert facts["first_tensor"]["name"] == "t5"
    assert len(facts["rounds"]) == 2
    assert facts["others"]["seconds"] == facts["rounds"][1]["seconds"]
    assert facts["rounds"][1]["ceiling_share"] == pytest.approx(
        facts["rounds"][1]["bytes_per_s"] / facts["rounds"][1]["ceiling_bytes_per_s"]
    )


def test_a_folder_in_one_round(manifest: Manifest, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["snapshot", "bench", str(tmp_path), "--rounds", "1"]).stdout
    assert "1 round\n" in shown
    assert "bare sockets" not in shown
