"""Uploads that reuse files: the files that the live revision lacks, the files taken from it, and files never taken from it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import BadInput, BaseChanged, CodeError
from pilotflame.runtime.node.packaging.archive import unpack
from pilotflame.runtime.node.packaging.code import KEPT_FILE, code_digest, file_digests, identity, pack
from pilotflame.runtime.node.packaging.reuse import FileDigests, ReusedRevision, lacking, take
from pydantic import ValidationError

NAMES = ("handler.py", "a/one.txt", "a/two.txt", "b/deep/three.bin", "umlaut ä.txt")
TREES = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.binary(max_size=8), st.booleans()))


def write(folder: Path, tree: dict[str, tuple[bytes, bool]]) -> Path:
    folder.mkdir()
    for name, (content, executable) in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755 if executable else 0o644)
    return folder


def digests(folder: Path) -> FileDigests:
    return FileDigests.model_validate({"files": list(file_digests(folder))})


def listed(staged: Path, *files: dict[str, object]) -> Path:
    staged.mkdir()
    (staged / KEPT_FILE).write_text(json.dumps({"files": files}))
    return staged


@settings(max_examples=20)
@given(TREES, TREES)
def test_an_upload_of_what_is_lacking_is_the_same_as_the_whole(old: dict, new: dict):
    with TemporaryDirectory() as folder:
        live, mine = write(Path(folder, "live"), old), write(Path(folder, "mine"), new)
        missing = set(lacking(live, digests(mine)))
        assert missing == {name for name, (content, _) in new.items() if old.get(name, (None,))[0] != content}
        kept = [file for file in file_digests(mine) if file["path"] not in missing]
        staged = Path(folder, "staged")
        unpack(pack(mine, kept=kept), staged)
        if kept:
            take(live, staged)
        assert code_digest(staged) == code_digest(mine)


def test_a_file_that_has_changed_meanwhile_is_not_taken(tmp_path: Path):
    live = write(tmp_path / "live", {"handler.py": (b"old", False)})
    kept = list(file_digests(live))
    (live / "handler.py").write_bytes(b"new")
    with pytest.raises(BaseChanged, match=r"handler\.py"):
        take(live, listed(tmp_path / "staged", *kept))
    (live / "handler.py").unlink()
    with pytest.raises(BaseChanged):
        take(live, listed(tmp_path / "again", *kept))


def test_no_link_and_no_device_is_followed(tmp_path: Path):
    """A function can make links in its own code folder. The gateway may read more than the function, so it follows none."""
    other = write(tmp_path / "other", {"secret.txt": (b"theirs", False), "in/secret.txt": (b"theirs", False)})
    live = write(tmp_path / "live", {"handler.py": (b"mine", False)})
    (live / "secret.txt").symlink_to(other / "secret.txt")
    (live / "in").symlink_to(other / "in")
    os.mkfifo(live / "pipe")
    (theirs, _) = file_digests(other)
    wanted = [
        theirs | {"path": path} for path in ("secret.txt", "in/secret.txt", "pipe", "in", "handler.py/x")
    ]
    assert len(lacking(live, FileDigests.model_validate({"files": wanted}))) == len(wanted)
    for number, file in enumerate(wanted):
        with pytest.raises(BaseChanged):
            take(live, listed(tmp_path / f"staged{number}", file))


@pytest.mark.parametrize("path", ["../other/secret.txt", "/etc/hostname", "a/../../x", "", "x\0y", "x" * 300])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str):
    live = write(tmp_path / "live", {"handler.py": (b"mine", False)})
    (file,) = file_digests(live)
    with pytest.raises(CodeError):
        take(live, listed(tmp_path / "staged", file | {"path": path}))
    assert [found.name for found in tmp_path.iterdir()] in (["live", "staged"], ["staged", "live"])


def test_a_file_is_kept_or_uploaded_and_never_written_through_a_link(tmp_path: Path):
    live = write(tmp_path / "live", {"handler.py": (b"mine", False), "in/x": (b"mine", False)})
    first, second = file_digests(live)
    staged = listed(tmp_path / "staged", first)
    (staged / "handler.py").write_bytes(b"uploaded")
    with pytest.raises(CodeError, match="kept and uploaded too"):
        take(live, staged)
    linked = listed(tmp_path / "linked", second)
    (linked / "in").symlink_to(tmp_path)
    with pytest.raises(CodeError, match="kept and uploaded too"):
        take(live, linked)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("text", [None, "{", '{"files": [{"path": "a"}]}', '{"files": [], "more": 1}'])
def test_a_list_that_is_missing_or_malformed_is_refused(tmp_path: Path, text: str | None):
    (tmp_path / "staged").mkdir()
    if text is not None:
        (tmp_path / "staged" / KEPT_FILE).write_text(text)
    with pytest.raises(CodeError, match="no valid"):
        take(tmp_path, tmp_path / "staged")


def test_the_values_of_a_list_are_counted_before_it_is_parsed(tmp_path: Path):
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / KEPT_FILE).write_text('{"files": [' + "[]," * 700_000 + "[]]}")
    with pytest.raises(CodeError, match="marks of values"):
        take(tmp_path, tmp_path / "staged")


def test_a_base_names_function_and_revision():
    assert ReusedRevision.parse("alpha/r4-1a2b3c4d") == ReusedRevision("alpha", "r4-1a2b3c4d")
    with pytest.raises(BadInput, match="FUNCTION/REVISION"):
        ReusedRevision.parse("alpha")


def test_a_folder_is_identified_by_what_it_is_and_not_by_its_path(tmp_path: Path):
    one, other = write(tmp_path / "one", {}), write(tmp_path / "other", {})
    before = identity(one)
    (tmp_path / "link").symlink_to(one)
    assert before == identity(tmp_path / "link") != identity(other)
    one.rename(tmp_path / "moved")
    assert identity(tmp_path / "moved") == before
    assert identity(one) == ""


def test_a_path_is_asked_for_once(tmp_path: Path):
    (file,) = file_digests(write(tmp_path / "live", {"handler.py": (b"mine", False)}))
    with pytest.raises(ValidationError, match="a path is there twice"):
        FileDigests.model_validate({"files": [file, file]})
    with pytest.raises(CodeError, match="a path is there twice"):
        take(tmp_path / "live", listed(tmp_path / "staged", file, file))


def test_nothing_is_hashed_for_a_caller_that_has_gone(tmp_path: Path):
    live = write(tmp_path / "live", {"handler.py": (b"mine", False)})
    gone = threading.Event()
    assert lacking(live, digests(live), gone) == []
    gone.set()
    assert lacking(live, digests(live), gone) == ["handler.py"]
