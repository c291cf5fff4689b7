"""Shards have the bytes of their manifest or are refused, and an unchanged file is read once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pilotflame.errors import SnapshotChanged
from pilotflame.snapshot.format.compared import ComparedShards, file_version
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest, NeededPart

NAME = "model.safetensors"
# Longer than a tick of the clock of file times. After this time, `file_version` returns a version.
TICKED_S = 0.03


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Manifest]:
    """The folder of a shard of three chunks, and its manifest. The last write was long ago."""
    header = b'{"a":{"dtype":"U8","shape":[10000],"data_offsets":[0,10000]}}   '
    (tmp_path / NAME).write_bytes(len(header).to_bytes(8, "little") + header + bytes(10000))
    time.sleep(TICKED_S)
    return tmp_path, create(tmp_path, chunk_bytes=4096)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the indices of the shards that were read."""
    found, read = list[int](), ComparedShards._read
    monkeypatch.setattr(
        ComparedShards, "_read", lambda self, number, file: found.append(number) or read(self, number, file)
    )
    return found


def write(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_an_unchanged_file_is_read_once(stored: tuple[Path, Manifest], reads: list[int]) -> None:
    shards = ComparedShards(*stored, {})
    for _ in range(3):
        shards.check()
        os.close(shards.open(NAME))
    assert reads == [0]
    ComparedShards(*stored, shards.versions).check()
    assert reads == [0]


SAME: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: path.chmod(0o600),
    "touch": lambda path: path.touch(),
    "copied": lambda path: (
        shutil.copy2(path, path.with_name("copy")) and path.with_name("copy").replace(path)
    ),
    "written again": lambda path: path.write_bytes(path.read_bytes()),
    "linked": lambda path: (path.rename(path.with_name("blob")), path.symlink_to("blob")),
}


@pytest.mark.parametrize("how", SAME)
def test_other_files_with_the_same_bytes_are_taken(
    stored: tuple[Path, Manifest], reads: list[int], how: str
) -> None:
    shards = ComparedShards(*stored, {})
    shards.check()
    SAME[how](stored[0] / NAME)
    time.sleep(TICKED_S)
    shards.check()
    shards.check()
    assert reads == [0, 0]


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "in place": (
        lambda path: write(path, 9000, b"x"),
        r"chunk 2 of 3 \(from byte 8192\), which holds a, differs",
    ),
    "header": (lambda path: write(path, 10, b"b"), r"chunk 0 of 3 .*, which holds a, differs"),
    "truncated": (lambda path: os.truncate(path, 100), "100 bytes instead of"),
    "grown": (lambda path: write(path, 20000, b"x"), "20001 bytes instead of"),
    "replaced": (
        lambda path: (path.with_name("n").write_bytes(b"n"), path.with_name("n").replace(path)),
        "1 bytes",
    ),
    "gone": (lambda path: path.unlink(), "No such file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("times", ["new", "reset"])
def test_other_bytes_are_refused_with_the_name_and_the_remedy(
    stored: tuple[Path, Manifest], how: str, times: str
) -> None:
    """A change is noticed even if a program resets the time of the last write, as `cp -p` and `rsync -t` do."""
    (change, fault), (root, manifest) = CHANGES[how], stored
    shards, before = ComparedShards(root, manifest, {}), (root / NAME).stat().st_mtime_ns
    shards.check()
    change(root / NAME)
    if times == "reset" and (root / NAME).exists():
        os.utime(root / NAME, ns=(before, before))
    for versions in (shards.versions, {}):
        seen = ComparedShards(root, manifest, versions)
        for see in (seen.check, lambda seen=seen: seen.open(NAME)):
            with pytest.raises(SnapshotChanged, match=fault) as told:
                see()
            assert NAME in told.value.message
            assert "Deploy again" in told.value.remedy


def test_a_file_of_this_moment_is_read_again_because_its_times_may_stay(
    stored: tuple[Path, Manifest], reads: list[int]
) -> None:
    (root, manifest), path = stored, stored[0] / NAME
    path.write_bytes(path.read_bytes())
    assert file_version(path.stat()) == ""
    shards = ComparedShards(root, manifest, {})
    shards.check()
    assert shards.versions == {NAME: ""}
    time.sleep(TICKED_S)
    shards.check()
    shards.check()
    assert len(reads) == 2


def test_a_new_hard_link_costs_nothing(stored: tuple[Path, Manifest], reads: list[int]) -> None:
    """Revisions that have the same weights share one file by hard links."""
    root, manifest = stored
    os.link(root / NAME, root / "first")
    time.sleep(TICKED_S)
    shards = ComparedShards(root, manifest, {})
    shards.check()
    os.link(root / NAME, root / "second")
    time.sleep(TICKED_S)
    shards.check()
    assert reads == [0]
    write(root / "first", 9000, b"x")
    with pytest.raises(SnapshotChanged):
        shards.check()


def test_a_file_that_lost_its_name_costs_nothing(stored: tuple[Path, Manifest], reads: list[int]) -> None:
    """A worker that has the file mapped goes on after a replacement by rename."""
    shards = ComparedShards(*stored, {})
    descriptor = shards.open(NAME)
    (stored[0] / NAME).unlink()
    shards.compare(NAME, descriptor)
    os.close(descriptor)
    assert reads == [0]


def test_only_the_needed_chunks_are_compared(stored: tuple[Path, Manifest]) -> None:
    root, manifest = stored
    part = manifest.model_copy(update={"part": NeededPart(chunks=((0, 1),), slices={})})
    write(root / NAME, 9000, b"x")
    ComparedShards(root, part, {}).check()
    write(root / NAME, 5000, b"x")
    with pytest.raises(SnapshotChanged, match="chunk 1"):
        ComparedShards(root, part, {}).check()
