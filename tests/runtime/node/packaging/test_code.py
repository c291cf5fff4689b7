"""Which files of a folder are a function's code; packing, copying and digesting agree on them."""

import os
import stat
import tarfile
from collections.abc import Collection
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.errors import CodeError
from pilotflame.runtime.node.packaging import code
from pilotflame.runtime.node.packaging.archive import unpack
from pilotflame.runtime.node.packaging.code import code_digest, copy_folder, pack, select


def make(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
        for path in folder.rglob("*")
        if path.is_file()
    }


def names(folder: Path, exclude: Collection[Path] = ()) -> list[str]:
    return [file.name for file in select(folder, exclude=exclude)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(
        tmp_path / "function",
        {"handler.py": b"def handler(e): ...\n", "lib/a.py": b"", "lib/data.bin": b"\0"},
    )


def test_round_trip(folder: Path, tmp_path: Path) -> None:
    (folder / "lib/a.py").chmod(0o755)
    unpack(pack(folder), tmp_path / "unpacked")
    copy_folder(folder, tmp_path / "copied")
    assert tree(tmp_path / "unpacked") == tree(tmp_path / "copied") == tree(folder)
    assert tree(folder)["lib/a.py"] == (b"", True)
    assert len({code_digest(tmp_path / name) for name in ("function", "unpacked", "copied")}) == 1


def test_packing_is_reproducible(folder: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again", {name: content for name, (content, _) in reversed(tree(folder).items())})
    os.utime(again / "handler.py", (1, 1))
    (again / "handler.py").chmod(0o600)
    assert pack(folder) == pack(again)
    with tarfile.open(fileobj=BytesIO(pack(folder))) as tar:
        assert {(m.uid, m.gid, m.uname, m.mtime) for m in tar} == {(0, 0, "", 0)}


def test_the_digest_is_of_path_bit_and_content(folder: Path) -> None:
    seen = {code_digest(folder)}
    (folder / "handler.py").write_text("pass\n")
    seen.add(code_digest(folder))
    (folder / "handler.py").chmod(0o755)
    seen.add(code_digest(folder))
    (folder / "handler.py").rename(folder / "other.py")
    seen.add(code_digest(folder))
    # An empty folder is not code.
    (folder / "empty").mkdir()
    seen.add(code_digest(folder))
    assert len(seen) == 4


def test_files_that_are_not_code_are_left_out(folder: Path) -> None:
    make(
        folder,
        dict.fromkeys(
            [
                ".git/config",
                "__pycache__/a.pyc",
                "lib/__pycache__/a.pyc",
                ".venv/x",
                "env/pyvenv.cfg",
                "env/bin/python",
                "a.pyc",
                "node_modules/x.js",
                "handler.py~",
                ".handler.py.swp",
                ".DS_Store",
                ".idea/x",
            ],
            b"x",
        ),
    )
    assert names(folder) == ["handler.py", "lib/a.py", "lib/data.bin"]


CREDENTIALS = [".env", ".env.local", "lib/server.pem", "tls.key", "id_rsa", "lib/id_ed25519.pub", ".aws/credentials",
               ".ssh/config", ".netrc", ".npmrc"]  # fmt: skip


def test_credentials_are_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    make(folder, dict.fromkeys([*CREDENTIALS, ".env.example", ".git/config", ".mypy_cache/x"], b"x"))
    assert names(folder) == [".env.example", "handler.py", "lib/a.py", "lib/data.bin"]
    found = {*CREDENTIALS, ".aws", ".ssh"} - {".aws/credentials", ".ssh/config"}
    assert set(code.withheld(folder)) == found
    copy_folder(folder, tmp_path / "copied")
    assert code.withheld(tmp_path / "copied") == []


def test_the_ignore_file_can_include_what_is_left_out_by_default(folder: Path) -> None:
    files = [".env", "ca.pem", ".git/config", "env/pyvenv.cfg", "node_modules/x.js", "__pycache__/a.pyc"]
    make(folder, dict.fromkeys(files, b"x"))
    (folder / ".pilotflameignore").write_text("!ca.pem\n!env/\n!node_modules/\n!.git/\n*.bin\n")
    included = [".git/config", ".pilotflameignore", "ca.pem", "env/pyvenv.cfg", "handler.py", "lib/a.py"]
    assert names(folder) == [*included, "node_modules/x.js"]
    assert code.withheld(folder) == [".env"]


def test_an_unpacked_archive_loses_what_is_not_code(folder: Path) -> None:
    make(folder, dict.fromkeys([".env", ".aws/credentials", "__pycache__/a.pyc", "lib/.git/config"], b"x"))
    (folder / "linked").symlink_to(".env")
    (folder / "lib/kept").symlink_to("a.py")
    code.remove_ignored(folder)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == [
        "handler.py", "lib", "lib/a.py", "lib/data.bin", "lib/kept"
    ]  # fmt: skip


def test_hostile_lines_of_an_upload_s_ignore_file_are_skipped(folder: Path) -> None:
    """With a backtracking matcher, the pattern would take hours."""
    name = "a" * 200
    make(folder, {name: b"", "skipped.txt": b""})
    (folder / ".pilotflameignore").write_text("*a" * 12 + "*b\n" + "x" * 10_000 + "\n*.txt\n")
    code.remove_ignored(folder)
    assert (folder / name).exists()
    assert not (folder / "skipped.txt").exists()


@pytest.mark.parametrize(
    ("ignore", "kept"),
    [
        ("*.bin", ["handler.py", "lib/a.py"]),
        ("lib/", ["handler.py"]),
        ("lib", ["handler.py"]),
        ("/a.py", ["handler.py", "lib/a.py", "lib/data.bin"]),
        ("lib/a.py", ["handler.py", "lib/data.bin"]),
        ("**/a.py", ["handler.py", "lib/data.bin"]),
        ("# lib\n\n*.py\n!handler.py\n", ["handler.py", "lib/data.bin"]),
        ("handler.py/", ["handler.py", "lib/a.py", "lib/data.bin"]),
        ("lib/*\n!lib/a.py", ["handler.py", "lib/a.py"]),
        ("[hl]*/**", ["handler.py"]),
        ("!__pycache__/\n*.bin", ["handler.py", "lib/a.py"]),
    ],
)
def test_the_ignore_file(folder: Path, ignore: str, kept: list[str]) -> None:
    make(folder, {"__pycache__/a.pyc": b""})
    (folder / ".pilotflameignore").write_text(ignore)
    assert names(folder) == [".pilotflameignore", *kept]


def test_an_ignore_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    for content in (b"\xff", b"!\n"):
        (folder / ".pilotflameignore").write_bytes(content)
        with pytest.raises(CodeError, match=r"\.pilotflameignore cannot be read"):
            select(folder)


def test_the_snapshot_is_left_out(folder: Path, tmp_path: Path) -> None:
    make(folder, {"weights/model.safetensors": b"w", "weights2/x": b"x"})
    # This link leaves the folder, as in the cache of Hugging Face. It is accepted, because no check looks into a snapshot.
    (folder / "weights/link").symlink_to("/etc/hostname")
    kept = ["handler.py", "lib/a.py", "lib/data.bin", "weights2/x"]
    assert names(folder, exclude=[Path("weights")]) == names(folder, exclude=[folder / "weights"]) == kept
    copy_folder(folder, tmp_path / "copied", exclude=[Path("weights")])
    assert names(tmp_path / "copied") == kept
    assert code_digest(tmp_path / "copied") == code_digest(folder, exclude=[Path("weights")])
    (folder / "weights/link").unlink()
    assert "weights/model.safetensors" not in names(folder, exclude=[Path("weights/model.safetensors")])


def test_a_snapshot_elsewhere_or_everywhere_leaves_nothing_out(folder: Path, tmp_path: Path) -> None:
    assert names(folder, exclude=[tmp_path / "elsewhere"]) == names(folder, exclude=[folder]) == names(folder)


def test_links_inside_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "same.py").symlink_to("handler.py")
    (folder / "alias").symlink_to(folder / "lib")
    assert names(folder) == [
        "alias/a.py",
        "alias/data.bin",
        "handler.py",
        "lib/a.py",
        "lib/data.bin",
        "same.py",
    ]
    copy_folder(folder, tmp_path / "copied")
    assert not any(path.is_symlink() for path in (tmp_path / "copied").rglob("*"))
    assert code_digest(tmp_path / "copied") == code_digest(folder)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("../secret", "lib/link is a link that leaves the folder"),
        ("../../secret", "lib/link is a link that leaves the folder"),
        ("/etc/passwd", "lib/link is a link that leaves the folder"),
        ("nothing", "lib/link is a link to nothing"),
        (".", "lib/link is a link to a folder that holds it"),
        ("..", "lib/link is a link to a folder that holds it"),
    ],
)
def test_other_links_are_refused(folder: Path, tmp_path: Path, target: str, expected: str) -> None:
    (tmp_path / "secret").write_text("s")
    if target == "../secret":
        (folder / "secret").symlink_to(tmp_path / "secret")
        (folder / ".pilotflameignore").write_text("/secret\n")
    (folder / "lib/link").symlink_to(target)
    with pytest.raises(CodeError) as caught:
        pack(folder)
    assert expected in caught.value.message
    assert caught.value.remedy


def test_links_of_links_end(folder: Path) -> None:
    for depth in range(20):
        (folder / f"d{depth}").mkdir()
        for fan in range(10):
            (folder / f"d{depth}/l{fan}").symlink_to(f"../d{depth + 1}")
    (folder / "d20").mkdir()
    with pytest.raises(CodeError, match="over 20000 files and folders"):
        select(folder)


def test_a_pipe_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(CodeError, match="pipe is neither a file nor a folder"):
        copy_folder(folder, folder.parent / "copied")


def test_a_name_that_is_not_utf8_is_refused(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()
    with pytest.raises(CodeError, match="is not UTF-8"):
        pack(folder)


def test_too_many_bytes_are_refused_and_the_biggest_files_named(folder: Path) -> None:
    for name, size in (("lib/model.bin", code.MAX_CODE_BYTES), ("small.bin", 2**20)):
        with (folder / name).open("wb") as file:
            # Make a sparse file, which takes no space on the disk.
            file.truncate(size)
    with pytest.raises(CodeError) as caught:
        pack(folder)
    assert (
        "257.0 MiB of code, more than 256 MiB; biggest: lib/model.bin (256.0 MiB), small.bin (1.0 MiB)"
        in str(caught.value)
    )
    assert "Put weights in a snapshot folder" in caught.value.remedy
    assert len(names(folder, exclude=[Path("lib/model.bin")])) == 4


def test_too_many_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 3)
    with pytest.raises(CodeError, match="over 3 files"):
        pack(folder)


def test_folders_that_cannot_be_read_or_written_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="nowhere is not a folder"):
        pack(tmp_path / "nowhere")
    with pytest.raises(CodeError, match="is not empty"):
        copy_folder(folder, folder)


_segment = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40).filter(
    lambda text: text not in (".", "..", code.IGNORE_FILE) and len(text.encode()) <= 200
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    files=st.dictionaries(
        st.tuples(_segment, _segment), st.tuples(st.binary(max_size=50), st.booleans()), max_size=5
    )
)
def test_any_names_round_trip(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, str], tuple[bytes, bool]]
) -> None:
    root = tmp_path_factory.mktemp("odd")
    folder = root / "folder"
    folder.mkdir()
    # Include files with names of credentials and of caches, too.
    (folder / code.IGNORE_FILE).write_text("!*\n")
    for (parent, name), (content, executable) in files.items():
        (folder / parent).mkdir(exist_ok=True)
        (folder / parent / name).write_bytes(content)
        (folder / parent / name).chmod(0o755 if executable else 0o644)
    unpack(pack(folder), root / "unpacked")
    copy_folder(folder, root / "copied")
    assert tree(root / "unpacked") == tree(root / "copied") == tree(folder)
    assert len(tree(folder)) == 1 + len(files)
    assert code_digest(root / "unpacked") == code_digest(folder)
