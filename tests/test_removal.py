"""Folders of untrusted code are removed, whatever is in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pilotflame.removal import remove_tree

DEEP = 1500


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in memory, where many files are made fast, and which other users can reach."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def make_deep(folder: Path, depth: int = DEEP) -> None:
    """Make folders in folders, whose path is longer than a path may be, with a file in each."""
    folder.mkdir()
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=place))
        os.mkdir("inner", dir_fd=place)
        inner = os.open("inner", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_tree_deeper_than_the_stack_is_removed(shared_memory: Path) -> None:
    make_deep(shared_memory / "deep")
    before = open_files()
    assert remove_tree(shared_memory / "deep")
    assert not (shared_memory / "deep").exists()
    assert open_files() == before


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    (folder := tmp_path / "folder").mkdir()
    (folder / "to_folder").symlink_to(kept)
    (folder / "to_nothing").symlink_to("nothing")
    (linked := tmp_path / "linked").symlink_to(kept)
    assert remove_tree(folder)
    # A link is no folder.
    assert not remove_tree(linked)
    assert [path.name for path in kept.iterdir()] == ["file"]


def test_what_may_not_be_read_or_written_is_removed(shared_memory: Path) -> None:
    (shared_memory / "top" / "of_another_user").mkdir(parents=True)
    (shared_memory / "top" / "of_another_user" / "file").touch()
    for folder in ("top", "top/of_another_user"):
        (shared_memory / folder).chmod(0o777)
    if (pid := os.fork()) == 0:
        try:
            # Drop root's rights, because root may read and write every folder.
            if os.getuid() == 0:
                os.setuid(65534)
            for mode in (0, 0o100, 0o400, 0o500):
                (folder := shared_memory / "top" / oct(mode)).mkdir(parents=True)
                (folder / "file").touch(mode=0)
                os.mkfifo(folder / "pipe")
                folder.chmod(mode)
            os._exit(0 if remove_tree(shared_memory / "top") else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not (shared_memory / "top").exists()


def test_the_work_is_limited(tmp_path: Path) -> None:
    for folder in range(10):
        (inner := tmp_path / "top" / str(folder)).mkdir(parents=True)
        for file in range(10):
            (inner / str(file)).touch()
    assert not remove_tree(tmp_path / "top", 30)
    left = sum(len(files) for _, _, files in os.walk(tmp_path / "top"))
    # Ten folders and twenty files have reached the limit.
    assert left == 80
    assert remove_tree(tmp_path / "top", 200)


def test_a_large_file_counts_as_several_entries(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "large").write_bytes(bytes(8 << 20))
    assert not remove_tree(tmp_path / "top", 3)
    assert remove_tree(tmp_path / "top", 8)


@pytest.mark.parametrize("name", ["missing", "missing/inner"])
def test_a_folder_that_is_not_there_counts_as_removed(tmp_path: Path, name: str) -> None:
    assert remove_tree(tmp_path / name)
