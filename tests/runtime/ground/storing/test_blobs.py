"""Blobs in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from blobs_tests import BlobsTests
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.ground.storing.blobs import FileBlobs


class TestFileBlobs(BlobsTests):
    """The store of one gateway."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> FileBlobs:
        return FileBlobs(tmp_path / "blobs")


def test_what_a_crash_has_left_is_deleted(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path / "blobs")
    blobs.keep([])
    for name in ("1-a-b", "1-a-c"):
        blobs.put(name, b"1")
    blobs.keep(["1-a-c"])
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == ["1-a-c"]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("")
    blobs = FileBlobs(tmp_path / "blobs")
    with pytest.raises(JobStoreFailed, match="blobs/1-a-b could not be written"):
        blobs.put("1-a-b", b"1")
    with pytest.raises(JobStoreFailed, match="blobs/1-a-b could not be read"):
        blobs.get("1-a-b")
