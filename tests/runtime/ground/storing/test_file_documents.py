"""Documents in files: the contract, the rights of files, real faults of disks, and crashes at any point of a change."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents_tests import DocumentsTests
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.storing.file_documents import FileDocuments

NAME = "access/keys.json"


class TestFileDocuments(DocumentsTests):
    """One gateway has the files, so `other` is the same object."""

    @pytest.fixture
    def documents(self, tmp_path: Path) -> FileDocuments:
        return FileDocuments(tmp_path)

    @pytest.fixture
    def other(self, documents: FileDocuments) -> FileDocuments:
        return documents


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_are_their_owners(tmp_path: Path):
    documents, state = FileDocuments(tmp_path / "state"), tmp_path / "state"
    before = os.umask(0o022)
    try:
        documents.put("access/secrets/f.json", b"1")
        documents.update("webhook-secret", lambda _: b"2")
        documents.put("habits/functions/f.json", b"3", durable=False)
    finally:
        os.umask(before)
    files = {path.relative_to(state).as_posix(): mode(path) for path in state.rglob("*") if path.is_file()}
    assert files == dict.fromkeys(
        ["access/secrets/f.json", "webhook-secret", "habits/functions/f.json"], 0o600
    )
    folders = [state, *(path for path in state.rglob("*") if path.is_dir())]
    assert [mode(folder) for folder in folders] == [0o700] * 5


def test_a_file_of_an_earlier_release_keeps_its_place_and_loses_the_rights_of_others(tmp_path: Path):
    documents, file = FileDocuments(tmp_path), tmp_path / "access" / "keys.json"
    file.parent.mkdir(mode=0o755)
    file.write_bytes(b"old")
    file.chmod(0o644)
    assert documents.get(NAME) == b"old"
    assert documents.place(NAME) == str(file)
    documents.update(NAME, lambda before: (before or b"") + b"er")
    assert (file.read_bytes(), mode(file)) == (b"older", 0o600)


def test_other_files_are_no_documents(tmp_path: Path):
    documents = FileDocuments(tmp_path)
    documents.put("access/a.json", b"1")
    for name in (".a.json.x1y2", "a.json~", ".hidden/b.json", "ä.json"):
        (tmp_path / "access" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "access" / name).write_bytes(b"no")
    assert documents.all("access/") == {"access/a.json": b"1"}


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path):
    documents = FileDocuments(tmp_path)
    documents.remove_leftovers("access/")
    kept = ["access/keys.json", "access/secrets/f.json", "habits/node.json"]
    for name in kept:
        documents.put(name, b"1")
    for name in ("access/.keys.json.ab", "access/secrets/.f.json.cd"):
        (tmp_path / name).write_bytes(b"secret")
    (tmp_path / "habits" / ".node.json.ef").write_bytes(b"")
    documents.remove_leftovers("access/")
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted([*kept, "habits/.node.json.ef"])


def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path: Path):
    documents = FileDocuments(tmp_path)
    (tmp_path / "access").touch()
    assert documents.get(NAME) is None
    with pytest.raises(GatewayError, match=r"access/keys\.json cannot be written: Not a directory"):
        documents.put(NAME, b"1")
    with pytest.raises(GatewayError, match="access cannot be read: Not a directory"):
        documents.all("access/")
    documents.put("folder/a", b"1")
    with pytest.raises(GatewayError, match="folder cannot be read: Is a directory"):
        documents.get("folder")
    with pytest.raises(GatewayError, match="too long"):
        documents.put("a" * 300, b"1")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_and_loses_nothing(small_disk: Path):
    documents = FileDocuments(small_disk)
    documents.put(NAME, b"old")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 900_000)
    for change in (
        lambda: documents.put(NAME, b"n" * 300_000),
        lambda: documents.update(NAME, lambda _: b"n" * 300_000),
        lambda: documents.put("access/secrets/f.json", b"n" * 300_000),
    ):
        with pytest.raises(GatewayError, match=r"\.json cannot be written: No space left") as caught:
            change()
        assert "disk is not full" in caught.value.remedy
    assert documents.all("access/") == {NAME: b"old"}
    assert [path.name for path in (small_disk / "access").rglob(".*")] == []
    # With free space on the disk, the same change succeeds.
    ballast.unlink()
    documents.put(NAME, b"n" * 300_000)
    assert documents.get(NAME) == b"n" * 300_000


def test_a_file_system_that_is_read_only_is_reported_and_read(small_disk: Path):
    documents = FileDocuments(small_disk)
    documents.put(NAME, b"old")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for change in (
        lambda: documents.put(NAME, b"new"),
        lambda: documents.update(NAME, lambda _: b"new"),
        lambda: documents.put("habits/node.json", b"new", durable=False),
    ):
        with pytest.raises(GatewayError, match="cannot be written: Read-only file system"):
            change()
    with pytest.raises(GatewayError, match="cannot be removed: Read-only file system"):
        documents.remove(NAME)
    assert documents.update(NAME, lambda before: before) == b"old"
    assert documents.all("access/") == {NAME: b"old"}


@pytest.mark.skipif(not os.geteuid(), reason="root may read and write everything")
def test_a_folder_without_rights_is_reported(tmp_path: Path):
    documents = FileDocuments(tmp_path)
    documents.put("access/secrets/f.json", b"1")
    folder = tmp_path / "access" / "secrets"
    folder.chmod(0)
    try:
        # The folder must not count as empty. Otherwise functions would start without their secrets.
        with pytest.raises(GatewayError, match="secrets cannot be read: Permission denied"):
            documents.all("access/secrets/")
        with pytest.raises(GatewayError, match="cannot be written: Permission denied"):
            documents.put("access/secrets/f.json", b"2")
    finally:
        folder.chmod(0o700)


# For each use of the file system in a change, a child process changes documents and dies there by SIGKILL. At number 0, the kernel
# ends the process in the middle of a write, at a limit of the file's size.
CRASHES = """
import os, resource, signal, shutil, sys
from pathlib import Path
from pilotflame.runtime.ground.storing.file_documents import FileDocuments

state, old, new = Path(sys.argv[1]), b"old" * 100_000, b"new" * 120_000
USES = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "tempfile.mkstemp"}
CHANGES = {
    "put": lambda documents: documents.put("access/keys.json", new),
    "update": lambda documents: documents.update("access/keys.json", lambda before: new),
    "remove": lambda documents: documents.remove("access/keys.json"),
    "create": lambda documents: documents.put("made/deep/one.json", new),
}


def child(change, number):
    used = 0

    def hook(event, _):
        nonlocal used
        if event in USES:
            used += 1
            if used == number:
                os.kill(os.getpid(), signal.SIGKILL)

    if number == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    sys.addaudithook(hook)
    change(FileDocuments(state))
    os._exit(0)


for name, change in CHANGES.items():
    number, results = -1, set()
    while True:
        number += 1
        shutil.rmtree(state, ignore_errors=True)
        FileDocuments(state).put("access/keys.json", old)
        if not (pid := os.fork()):
            child(change, number)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        documents = FileDocuments(state)
        found = documents.all("access/") | documents.all("made/")
        for prefix in ("access/", "made/"):
            documents.remove_leftovers(prefix)
        left = {path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()}
        assert left == found.keys(), (name, number, left)
        before = {"access/keys.json": old}
        after = {"put": {"access/keys.json": new}, "remove": {}, "create": before | {"made/deep/one.json": new}}
        assert found in (before, after.get(name, after["put"])), (name, number, found.keys())
        results.add(found == before)
        # The next gateway can change the document.
        documents.put("access/keys.json", b"next")
        assert documents.get("access/keys.json") == b"next"
        assert killed or number > 0 or name == "remove"
        if not killed and number > 0:
            assert found != before
            break
    print(name, number, results)
"""


def test_a_crash_at_any_point_leaves_the_old_or_the_new_document(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path / "state")],
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in rows] == ["put", "update", "remove", "create"]
    # Each change crashed at least once before it took effect, and at least once after.
    assert {results for _, _, results in rows} == {"{False, True}"}
    assert all(int(number) > 2 for _, number, _ in rows), done.stdout
