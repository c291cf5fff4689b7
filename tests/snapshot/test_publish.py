"""Files and folders are published completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.errors import CacheError, SnapshotError
from pilotflame.snapshot.publish import publish, publish_folder


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with publish(tmp_path / "f") as stream:
        stream.write(b"new")
        assert (tmp_path / "f").read_bytes() == b"old"
    assert (tmp_path / "f").read_bytes() == b"new"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


def test_a_file_that_fails_leaves_what_was(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(TypeError), publish(tmp_path / "f") as stream:
        stream.writelines([b"new", None])  # type: ignore[list-item]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    # An empty folder may be replaced.
    (tmp_path / "out").mkdir()
    with publish_folder(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "f").write_bytes(b"1")
        assert not any((tmp_path / "out").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "sub" / "f").read_bytes() == b"1"
    with publish_folder(tmp_path / "a" / "b") as folder:
        (folder / "f").touch()
    assert (tmp_path / "a" / "b" / "f").exists()


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError), publish_folder(tmp_path / "out") as folder:
        (folder / "f").write_text(3)  # type: ignore[arg-type]
    with (
        pytest.raises(CacheError, match="out cannot be written: No space left"),
        publish_folder(tmp_path / "out"),
    ):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    (tmp_path / "file").touch()
    for name in ("out", "file"):
        with (
            pytest.raises(SnapshotError, match=f"{name} is there and not empty"),
            publish_folder(tmp_path / name),
        ):
            pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "out"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    name = "模" * 85
    with publish(tmp_path / name) as stream:
        stream.write(b"new")
    with publish_folder(tmp_path / "folder" / name) as folder:
        (folder / "f").touch()
    assert (tmp_path / name).read_bytes() == b"new"
    assert (tmp_path / "folder" / name / "f").exists()
