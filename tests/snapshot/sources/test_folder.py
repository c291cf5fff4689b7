"""A folder as a source: ranges, names that stay inside, links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pilotflame.errors import CacheError, SnapshotError, SourceMissing
from pilotflame.snapshot.sources.folder import FolderSource
from source_tests import OBJECTS, SourceTests


class TestFolderSource(SourceTests):
    @pytest.fixture
    def source(self, tmp_path: Path) -> FolderSource:
        for name, data in OBJECTS.items():
            (tmp_path / "weights" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "weights" / name).write_bytes(data)
        return FolderSource(tmp_path / "weights")


def test_a_linked_file_is_followed_as_the_hugging_face_cache_needs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "abc").write_bytes(b"1234")
    (snapshot / "model.safetensors").symlink_to("../blobs/abc")
    assert FolderSource(snapshot).stat("model.safetensors").size_bytes == 4


def test_a_linked_directory_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (outside / "f").mkdir(parents=True)
    (outside / "secret").write_bytes(b"1")
    inside.mkdir()
    (inside / "out").symlink_to(outside)
    (inside / "real").mkdir()
    (inside / "real" / "f").write_bytes(b"12")
    (inside / "near").symlink_to("real")
    with pytest.raises(SnapshotError, match="linked directory"):
        FolderSource(inside).stat("out/secret")
    assert FolderSource(inside).stat("near/f").size_bytes == 2


def test_a_loop_of_links_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceMissing, match="loop cannot be followed"):
        FolderSource(tmp_path).stat("loop/f")


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(SnapshotError, match="not a regular file"):
            FolderSource(tmp_path).stat(name)
    with pytest.raises(SnapshotError, match="No such file"):
        FolderSource(tmp_path).stat("missing")


def test_names_are_those_of_files_that_are_not_hidden(tmp_path: Path) -> None:
    for name in ("b", "a/c", ".hidden", ".git/config", "a/.x/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "broken").symlink_to("absent")
    assert FolderSource(tmp_path).names() == ["a/c", "b", "link"]
    assert FolderSource(tmp_path / "absent").names() == []


def test_put_writes_files_and_bytes_whole(tmp_path: Path) -> None:
    source, sent = FolderSource(tmp_path / "new"), list[int]()
    source.put("a/b", b"12")
    (tmp_path / "large").write_bytes(b"x" * (17 << 20))
    source.put("a/large", tmp_path / "large", sent.append)
    source.put("empty", tmp_path / "new" / "a" / "b")
    source.put("a/b", b"")
    assert source.names() == ["a/b", "a/large", "empty"]
    assert source.stat("a/b").size_bytes == 0
    assert (tmp_path / "new" / "a" / "large").read_bytes() == (tmp_path / "large").read_bytes()
    assert sent == [1 << 20] * 17


def test_put_stays_inside_and_says_what_fails(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to("../outside")
    source = FolderSource(tmp_path / "in")
    for name in ("../x", "out/x", "/x"):
        with pytest.raises(SnapshotError):
            source.put(name, b"1")
    (tmp_path / "in" / "file").touch()
    with pytest.raises(CacheError, match=r"in/file/x cannot be written"):
        source.put("file/x", b"1")
    assert not list((tmp_path / "outside").iterdir())
