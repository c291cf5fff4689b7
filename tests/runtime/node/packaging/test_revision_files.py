"""The files of a revision travel between gateways, complete and unchanged, and no other files travel with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from pilotflame.errors import CodeError, GatewayError
from pilotflame.runtime.ground.storing.blobs import FileBlobs
from pilotflame.runtime.node.packaging import revision_files
from pilotflame.runtime.node.packaging.revision_files import PackedFiles, RevisionFiles, pack_files


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "blobs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make the folder of a revision with code, a named snapshot, and files that concern only this machine."""
    folder = tmp_path / "staging" / "r1"
    for name, text in {
        "code/handler.py": "x", "code/run.sh": "#!", "code/deep/versions.json": "mine", "code/revision.json": "mine",
        "manifest.json": "{}", "assets/compared": "asset", "snapshots/a/manifest.json": "{}",
        "revision.json": "local", "versions.json": "local", "compared": "local", "snapshots/a/versions.json": "local",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "code/run.sh").chmod(0o555)
    (folder / "code/deep/link").symlink_to("../handler.py")
    (folder / "code/same").symlink_to("deep")
    (folder / "code/empty").mkdir()
    return folder


def packed(folder: Path) -> PackedFiles:
    return pack_files(folder, "code", "revision.json")


def content(folder: Path) -> dict[str, tuple[str, bool]]:
    """Return, by path, the text or target of each file, and whether its owner may execute it."""
    found = {}
    for path in folder.rglob("*"):
        text = f"-> {path.readlink()}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
        found[str(path.relative_to(folder))] = (
            text,
            path.is_file() and os.access(path, os.X_OK) and path.suffix == ".sh",
        )
    return found


def test_what_belongs_to_a_revision_travels(blobs: FileBlobs, folder: Path, tmp_path: Path) -> None:
    files, before = RevisionFiles(blobs), content(folder)
    one = packed(folder)
    files.put(one)
    into = tmp_path / "staging" / "other"
    files.get(one.name, into)
    local = ("revision.json", "versions.json", "compared", "snapshots/a/versions.json")
    assert content(into) == {name: facts for name, facts in before.items() if name not in local}
    assert before["code/run.sh"] == ("#!", True)
    assert content(into)["code/deep/link"] == ("-> ../handler.py", False)


def test_the_same_files_have_one_name(folder: Path, blobs: FileBlobs, tmp_path: Path) -> None:
    one = packed(folder)
    os.utime(folder / "code/handler.py", (1, 1))
    (folder / "revision.json").write_text("another")
    again = packed(folder)
    assert again.name == one.name
    for each in (one, again):
        RevisionFiles(blobs).put(each)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [f"{one.name}-0"]
    (folder / "code/handler.py").write_text("y")
    with packed(folder).file as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() != one.name.partition("-")[0]


def test_large_files_are_several_blobs(
    folder: Path, blobs: FileBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revision_files, "PART_BYTES", 1 << 20)
    weights = os.urandom(3_500_000)
    (folder / "code/model.bin").write_bytes(weights)
    files, one = RevisionFiles(blobs), packed(folder)
    files.put(one)
    assert len(list((tmp_path / "blobs").iterdir())) == 4
    files.get(one.name, into := tmp_path / "staging" / "other")
    assert (into / "code/model.bin").read_bytes() == weights
    blobs.put("old-1-0", b"1")
    files.keep([one.name])
    assert blobs.get("old-1-0") is None
    blobs.delete([f"{one.name}-2"])
    with pytest.raises(GatewayError, match="damaged or gone"):
        files.get(one.name, tmp_path / "staging" / "third")
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["other", "r1"]


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [("../escaped", tarfile.REGTYPE, ""), ("/escaped", tarfile.REGTYPE, ""), ("code/a", tarfile.SYMTYPE, "../../r1"),
     ("code/a", tarfile.SYMTYPE, "/etc/passwd"), ("code/a", tarfile.CHRTYPE, "")],
)  # fmt: skip
def test_files_that_leave_the_folder_are_refused(
    name: str, kind: bytes, target: str, blobs: FileBlobs, folder: Path, tmp_path: Path
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    archive = gzip.compress(member.tobuf() + bytes(1024))
    stored = PackedFiles(io.BytesIO(archive), f"{hashlib.sha256(archive).hexdigest()}-1")
    files = RevisionFiles(blobs)
    files.put(stored)
    with pytest.raises(CodeError):
        files.get(stored.name, tmp_path / "staging" / "other")
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["r1"]


def test_too_much_is_refused_before_it_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(revision_files, "MOST_BYTES", 10)
        with pytest.raises(CodeError, match="MiB of files, the most that gateways exchange") as caught:
            packed(folder)
        assert "s3://" in caught.value.remedy
    monkeypatch.setattr(revision_files, "MAX_FILES", 3)
    with pytest.raises(CodeError, match="more than 3 files and folders"):
        packed(folder)


def test_a_link_in_the_place_of_a_file_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the function may replace a file by a link while the code is packed."""
    before = (folder / "code/handler.py").lstat()
    monkeypatch.setattr(Path, "lstat", lambda _: before)
    with tarfile.open(fileobj=io.BytesIO(), mode="w") as tar, pytest.raises(OSError, match="symbolic link"):
        revision_files._add(tar, folder / "code/deep/link", "link")
