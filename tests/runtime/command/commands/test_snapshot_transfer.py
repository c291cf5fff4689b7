"""`pilotflame snapshot pull|cache`: files, output, and what an interrupt or a kill leaves."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fault_server import Faults, FaultServer, Request
from pilotflame.errors import CacheError, PilotflameError, SourceMissing
from pilotflame.runtime.cli import cli
from pilotflame.runtime.command.client import options
from pilotflame.snapshot.caching.download import MARK_NAME
from pilotflame.snapshot.caching.node import node_tiers
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.realm import realm_of
from pulling import CHUNK_BYTES, Stopping, check, make

MIB = 1 << 20
SHARD = "model.safetensors"
Snapshot = Callable[..., Result]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """The folder of a temporary cache; its files in memory are deleted afterwards."""
    folder = tmp_path / "cache"
    yield folder
    for tier in node_tiers(folder):
        shutil.rmtree(tier.root, ignore_errors=True)


@pytest.fixture
def snapshot(cache: Path) -> Snapshot:
    """Runs `pilotflame snapshot …` in this process."""

    def ran(*arguments: object) -> Result:
        runner = CliRunner(env={"PILOTFLAME_CACHE_DIR": str(cache)})
        return runner.invoke(cli, ["snapshot", *map(str, arguments)])

    return ran


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    make(tmp_path / "origin", tensors=32)
    return tmp_path / "origin"


@pytest.fixture
def server(origin: Path) -> Iterator[FaultServer]:
    with FaultServer(origin) as served:
        yield served


def refusal(done: Result, kind: type[PilotflameError]) -> str:
    assert done.exit_code == 1
    assert isinstance(done.exception, kind), done.exception
    return str(done.exception)


# -- pull


def test_pull_copies_a_snapshot_and_prints_how(
    snapshot: Snapshot, server: FaultServer, origin: Path, tmp_path: Path
) -> None:
    done = snapshot("pull", f"{server.url}/", tmp_path / "here", "--connections", 2)
    assert done.exit_code == 0, done.output
    assert f"pulled {server.url} into {tmp_path / 'here'}" in done.stdout
    assert "32 tensors" in done.stdout
    assert "2 connections, 0 retries, 0 stalls" in done.stdout
    verify(tmp_path / "here", Manifest.read(origin))
    again = snapshot("pull", server.url, tmp_path / "here")
    assert "all of it was there" in again.stdout


def test_pull_as_json(snapshot: Snapshot, server: FaultServer, origin: Path, tmp_path: Path) -> None:
    shutil.copy(origin / SHARD, tmp_path / "kept")
    (tmp_path / "here").mkdir()
    with (origin / SHARD).open("rb") as stream:
        (tmp_path / "here" / SHARD).write_bytes(
            stream.read(4 * CHUNK_BYTES).ljust((origin / SHARD).stat().st_size, b"\0")
        )
    # A pull that was killed leaves this file behind.
    (tmp_path / "here" / MARK_NAME).write_text(Manifest.read(origin).digest)
    done = snapshot("pull", server.url, tmp_path / "here", "--part-mib", 1, "--json")
    facts = json.loads(done.stdout)
    manifest = Manifest.read(origin)
    assert (facts["digest"], facts["bytes"]) == (manifest.digest, manifest.total_bytes)
    assert facts["kept_bytes"] == 4 * CHUNK_BYTES
    assert facts["fetched_bytes"] == facts["received_bytes"] == manifest.total_bytes - 4 * CHUNK_BYTES
    assert (facts["retries"], facts["stalls"]) == (0, 0)


def test_pull_from_a_folder_and_over_another(snapshot: Snapshot, origin: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", seed=1)
    assert "--force" in refusal(snapshot("pull", origin, tmp_path / "other"), CacheError)
    assert snapshot("pull", origin, tmp_path / "other", "--force").exit_code == 0
    check(tmp_path / "other", origin)


def test_variables_of_sources_are_no_settings(
    snapshot: Snapshot, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PILOTFLAME_S3_ANONYMOUS", "PILOTFLAME_S3_REQUESTER_PAYS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PILOTFLAME_SNAPSHOT_TOKEN", "hush")
    monkeypatch.setenv("PILOTFLAME_SNAPSHOT_HEADERS", "X-Team: a\nX-Room: b")
    done = snapshot("pull", server.url, tmp_path / "here")
    assert done.exit_code == 0, done.output
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer hush"}
    # `serve` reads the same settings, so it must accept them, too.
    assert options.gateway_settings().port


def test_pull_names_what_is_missing(snapshot: Snapshot, server: FaultServer, tmp_path: Path) -> None:
    said = refusal(snapshot("pull", f"{server.url}/nowhere?key=secret", tmp_path / "here"), SourceMissing)
    assert "There are no weights at" in said
    assert "secret" not in said
    assert "nothing-there" in refusal(
        snapshot("pull", tmp_path / "nothing-there", tmp_path / "here"), SourceMissing
    )
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "arguments",
    [("x",), ("x", "y", "--into-cache"), ("x", "--into-cache", "--force"), ("x", "y", "--connections", "0")],
)
def test_a_wrong_pull_is_exit_code_2(snapshot: Snapshot, arguments: tuple[str, ...]) -> None:
    assert snapshot("pull", *arguments).exit_code == 2


class Halt:
    """Faults that serve the first MiB of the weights, then set `reached` and stall."""

    def __init__(self, least: int = MIB) -> None:
        self.least = least
        self.reached = threading.Event()
        self.over = False

    def __call__(self, request: Request) -> Faults:
        if request.name != SHARD or request.begin < self.least or self.over:
            return Faults()
        self.reached.set()
        return Faults(stall_share=1.0, stall_s=60.0)


def test_ctrl_c_ends_at_once_and_keeps_what_came(start, run, server: FaultServer, origin: Path, tmp_path: Path, cache: Path) -> None:  # fmt: skip
    server.faults = halt = Halt()
    here = tmp_path / "here"
    process = start(
        "snapshot", "pull", server.url, here, "--connections", 1, "--part-mib", 1, PILOTFLAME_CACHE_DIR=str(cache)
    )  # fmt: skip
    assert halt.reached.wait(30)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert said.count("\n") == 1
    assert "what has arrived is kept" in said
    assert str(here) in said
    assert not (here / MANIFEST_NAME).exists()


def test_ctrl_c_ends_a_pull_into_the_cache_too(start, server: FaultServer, cache: Path) -> None:
    server.faults = halt = Halt(0)
    process = start("snapshot", "pull", server.url, "--into-cache", PILOTFLAME_CACHE_DIR=str(cache))
    assert halt.reached.wait(30)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=20)
    assert (process.returncode, out, said.count("\n")) == (130, "", 1)
    assert f"is kept in {cache}" in said


def test_after_kill_9_the_same_command_goes_on(start, snapshot: Snapshot, server: FaultServer, origin: Path, tmp_path: Path, cache: Path) -> None:  # fmt: skip
    server.faults = halt = Halt()
    here = tmp_path / "here"
    process = start(
        "snapshot", "pull", server.url, here, "--connections", 1, "--part-mib", 1, PILOTFLAME_CACHE_DIR=str(cache)
    )  # fmt: skip
    assert halt.reached.wait(30)
    process.kill()
    process.wait(20)
    assert not (here / MANIFEST_NAME).exists()
    halt.over = True
    done = snapshot("pull", server.url, here, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kept_bytes"] >= MIB
    verify(here, Manifest.read(origin))
    check(here, origin)


# -- cache


def test_the_cache_is_filled_listed_and_evicted(
    snapshot: Snapshot, server: FaultServer, origin: Path, cache: Path
) -> None:
    assert json.loads(snapshot("cache", "--json").stdout)["snapshots"] == []
    pulled = json.loads(snapshot("pull", server.url, "--into-cache", "--json").stdout)
    digest = pulled["digest"]
    assert digest == Manifest.read(origin).with_realm(realm_of(server.url)).digest
    check(Path(pulled["path"]), origin)
    assert "all of it was there" in snapshot("pull", server.url, "--into-cache").stdout
    listed = json.loads(snapshot("cache", "--json").stdout)
    assert {row["digest"] for row in listed["snapshots"]} == {digest}
    assert all(row["ready"] and row["percent"] == 100 for row in listed["snapshots"])
    assert {"disk"} <= {row["tier"] for row in listed["snapshots"]} <= {"disk", "tmpfs"}
    shown = snapshot("cache").stdout
    assert digest[:16] in shown
    assert "ready" in shown
    assert str(cache) in shown
    assert json.loads(snapshot("cache", "--evict", digest[:6], "--json").stdout) == {"evicted": digest}
    in_memory = "tmpfs" in {row["tier"] for row in listed["snapshots"]}
    assert ("spare files" in snapshot("cache").stdout) == in_memory
    assert json.loads(snapshot("cache", "--json").stdout)["snapshots"] == []
    assert "pilotflame snapshot cache" in refusal(snapshot("cache", "--evict", digest), CacheError)


def test_an_unfinished_pull_is_shown_in_percent_and_not_evicted(
    snapshot: Snapshot, origin: Path, cache: Path
) -> None:
    from pilotflame.snapshot.caching.cache import Cache

    manifest, source = Manifest.read(origin), Stopping(origin, MIB)
    disk = Cache([tier for tier in node_tiers(cache) if tier.kind == "disk"])
    with disk.open(manifest, source) as lease:
        lease.arrival.wait(0, MIB // CHUNK_BYTES - 1, 20)
        (row,) = json.loads(snapshot("cache", "--json").stdout)["snapshots"]
        assert (row["ready"], row["tier"]) == (False, "disk")
        assert 0 < row["percent"] < 100
        assert f"{row['percent']} %" in snapshot("cache").stdout
        assert "in use" in refusal(snapshot("cache", "--evict", manifest.digest), CacheError)
        source.go()
        lease.wait(20)


def test_an_ambiguous_digest_is_refused(snapshot: Snapshot, cache: Path, origin: Path) -> None:
    for digest in ("ab01", "ab02"):
        (cache / "snapshots" / digest / "files").mkdir(parents=True)
    assert "2 snapshots" in refusal(snapshot("cache", "--evict", "ab"), CacheError)
    assert snapshot("cache", "--evict", "ab01").exit_code == 0
