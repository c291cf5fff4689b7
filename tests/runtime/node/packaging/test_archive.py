"""Unpacking archives that are hostile or broken."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.errors import CodeError
from pilotflame.runtime.node.packaging import archive as unpack_module
from pilotflame.runtime.node.packaging.archive import unpack

KINDS = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE,
         "fifo": tarfile.FIFOTYPE, "char": tarfile.CHRTYPE, "block": tarfile.BLKTYPE}  # fmt: skip

# The kind, the name, and the content or the target of the link.
Member = tuple[str, str, str]


def archive(*members: Member) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for kind, name, content in members:
            info = tarfile.TarInfo(name)
            info.type = KINDS[kind]
            info.mode = 0o7777
            if kind == "file":
                info.size = len(content.encode())
            else:
                info.linkname = content
            tar.addfile(info, io.BytesIO(content.encode()) if kind == "file" else None)
    return packed.getvalue()


def outside(root: Path) -> dict[str, str]:
    return {
        str(path): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and root / "into" not in path.parents
    }


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "into"


def test_a_plain_archive(into: Path) -> None:
    unpack(archive(("dir", "./", ""), ("file", "./handler.py", "x"), ("dir", "e/", "")), into)
    assert (into / "handler.py").read_text() == "x"
    assert (into / "e").is_dir()
    assert (into / "handler.py").stat().st_mode & 0o7777 == 0o755


def test_links_inside_are_kept(into: Path) -> None:
    unpack(
        archive(
            ("sym", "lib/link", "../a/../handler.py"),
            ("file", "handler.py", "x"),
            ("file", "a/b/c.py", "y"),
            ("sym", "alias", "a/b"),
            ("hard", "hard.py", "./handler.py"),
        ),
        into,
    )
    assert (into / "lib/link").read_text() == "x"
    assert (into / "alias/c.py").read_text() == "y"
    assert (into / "hard.py").read_text() == "x"
    assert (into / "hard.py").stat().st_ino != (into / "handler.py").stat().st_ino


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("file", "../evil", "x")], "'../evil' leaves the folder"),
        ([("file", "a/../../evil", "x")], "leaves the folder"),
        ([("file", "/tmp/evil", "x")], "'/tmp/evil' leaves the folder"),
        ([("dir", "/tmp/evil", "")], "leaves the folder"),
        ([("sym", "a", "../secret")], "'a' leaves the folder, to '../secret'"),
        ([("sym", "a", "/etc/passwd")], "'a' leaves the folder, to '/etc/passwd'"),
        ([("sym", "a", ".."), ("file", "a/evil", "x")], "'a' leaves the folder"),
        (
            [("sym", "a", "b"), ("file", "a/evil", "x"), ("dir", "b", "")],
            "'a/evil' is below a file or a link",
        ),
        (
            [("dir", "d", ""), ("sym", "a", "d"), ("sym", "b", "a/../secret")],
            "'b' is a link to 'secret', which is no",
        ),
        ([("sym", "a", "."), ("file", "x", "")], "'a' is a link to a folder that holds it"),
        ([("sym", "d/a", "../d")], "'d/a' is a link to a folder that holds it"),
        ([("sym", "a", "a")], "'a' is a link to 'a', which is no file or folder"),
        ([("sym", "a", "b"), ("sym", "b", "a")], "'a' is a link to 'b', which is no file or folder"),
        ([("hard", "a", "../secret")], "'a' leaves the folder, to '../secret'"),
        ([("hard", "a", "/etc/passwd")], "'a' leaves the folder, to '/etc/passwd'"),
        ([("hard", "a", "b"), ("file", "b", "x")], "'a' is a hard link to 'b', which is no earlier file"),
        ([("dir", "d", ""), ("sym", "b", "d"), ("hard", "a", "b")], "'a' is a hard link to 'b'"),
        ([("fifo", "a", "")], "'a' is neither a file"),
        ([("char", "a", "")], "'a' is neither a file"),
        ([("block", "a", "")], "'a' is neither a file"),
        ([("file", "a", "x"), ("file", "a", "y")], "'a' is a duplicate"),
        ([("file", "a", "x"), ("file", "./a", "y")], "'./a' is a duplicate"),
        ([("file", "a", "x"), ("dir", "a", "")], "'a' is a duplicate"),
        ([("file", "a", "x"), ("file", "a/b", "y")], "'a/b' is below a file"),
        ([("dir", "a", ""), ("sym", "a", "..")], "'a' is a duplicate"),
        ([("file", ".", "x")], "'.' is a duplicate"),
        ([("file", "a" * 256, "x")], "is longer than"),
        ([("file", "/".join(["a" * 100] * 6), "x")], "is longer than"),
        ([("file", "a\udcff", "x")], "is not UTF-8"),
    ],
)
def test_an_attack_is_refused_by_member(into: Path, members: list[Member], expected: str) -> None:
    before = outside(into.parent)
    with pytest.raises(CodeError) as caught:
        unpack(archive(*members), into)
    assert expected in caught.value.message
    assert caught.value.remedy
    assert outside(into.parent) == before
    assert not into.exists()


def test_too_many_members_are_refused(into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "MAX_FILES", 2)
    with pytest.raises(CodeError, match="'c' exceeds the limit of 2 members"):
        unpack(archive(("file", "a", ""), ("dir", "b", ""), ("file", "c", "")), into)


def test_too_many_bytes_are_refused(into: Path) -> None:
    with pytest.raises(CodeError, match=r"exceed .* at 'b'"):
        unpack(archive(("file", "a", "x" * 6), ("file", "b", "x" * 6)), into, 10)
    with pytest.raises(CodeError, match=r"exceed .* at 'b'"):
        unpack(archive(("file", "a", "x" * 6), ("hard", "b", "a")), into, 10)


def test_a_bomb_in_a_header_is_stopped(into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "_MAX_MORE_BYTES", 2**20)
    header = tarfile.TarInfo("bomb")
    header.type, header.size = tarfile.XHDTYPE, 2**33
    bomb = gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(2**22))
    with pytest.raises(CodeError, match="headers have too many bytes"):
        unpack(bomb, into, 0)


def block(kind: bytes, content: bytes = b"", name: str = "x") -> bytes:
    """Return the header and the content of a member of this kind."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


def field(size: int) -> bytes:
    """Return a field of a PAX header that has `size` bytes."""
    length = b"%d x=" % size
    return length + b"a" * (size - len(length) - 1) + b"\n"


def endless_map() -> bytes:
    """Return the header of a sparse file whose map continues in each following block, and many such blocks."""
    plain = bytearray(block(tarfile.GNUTYPE_SPARSE))
    plain[482] = 1
    plain[148:156] = b"%06o\0 " % (256 + sum(plain[:148]) + sum(plain[156:512]))
    return bytes(plain) + (bytes(504) + b"\1" + bytes(7)) * 8000


PAX, FILE = tarfile.XHDTYPE, tarfile.REGTYPE
TOO_LARGE = {
    "a large header": [block(PAX, field(4 << 20))],
    "a long name": [block(tarfile.GNUTYPE_LONGNAME, b"a" * (4 << 20))],
    "a long list of headers": [block(PAX, field(4 << 10)) + block(FILE, name=str(one)) for one in range(1100)],
    "global headers": [block(tarfile.XGLTYPE, field(600)) + block(FILE, name=str(one)) for one in range(20)],
    "a sparse file": [endless_map()],
    "a chain": [block(PAX, field(40)) * 2000],
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_headers_that_would_fill_the_memory_are_refused(into: Path, name: str) -> None:
    packed = gzip.compress(b"".join(TOO_LARGE[name]) + block(FILE, name="end"), 1)
    with pytest.raises(CodeError, match="headers have too many bytes"):
        unpack(packed, into)
    assert not into.exists()


def test_headers_of_usual_archives_are_read(into: Path) -> None:
    """Usual archives have extra headers: git writes a global header; macOS and POSIX archives have attributes and times."""
    commit = block(tarfile.XGLTYPE, b"52 comment=" + b"0" * 40 + b"\n")
    files = [block(PAX, field(2000)) + block(FILE, b"x", name=str(one)) for one in range(1000)]
    unpack(gzip.compress(commit + b"".join(files) + bytes(1024), 1), into)
    assert len(list(into.iterdir())) == 1000


@pytest.mark.parametrize(
    "broken", [b"", b"x", b"\x1f\x8b", gzip.compress(b"x" * 700, mtime=0), b"PK\x03\x04zip"]
)
def test_what_is_not_an_archive_is_refused(into: Path, broken: bytes) -> None:
    with pytest.raises(CodeError, match=r"The archive is not a complete tar\.gz"):
        unpack(broken, into)
    assert not into.exists()


def test_a_truncated_archive_is_refused(into: Path) -> None:
    whole = archive(("file", "a", os.urandom(3000).hex()))
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        with pytest.raises(CodeError, match="not a complete"):
            unpack(whole[:length], into)


def test_a_wrong_checksum_is_refused(into: Path) -> None:
    whole = bytearray(archive(("file", "a", "x")))
    whole[-5] ^= 1
    whole[-8] ^= 1
    with pytest.raises(CodeError, match="CRC check failed"):
        unpack(bytes(whole), into)


def test_a_folder_that_is_not_empty_is_left_alone(into: Path) -> None:
    into.mkdir()
    (into / "mine").touch()
    with pytest.raises(CodeError, match="is not empty"):
        unpack(archive(), into)
    assert (into / "mine").exists()


_name = st.lists(st.sampled_from(["a", "b", "..", ".", "", "c"]), max_size=4).map("/".join)
_member = st.tuples(st.sampled_from(list(KINDS)), _name, _name)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(members=st.lists(_member, max_size=6))
def test_no_archive_reaches_outside(tmp_path_factory: pytest.TempPathFactory, members: list[Member]) -> None:
    root = tmp_path_factory.mktemp("attack")
    into = root / "deep" / "into"
    (root / "a").write_text("secret")
    try:
        unpack(archive(*members), into)
    except CodeError:
        assert not into.exists()
    else:
        for path in into.rglob("*"):
            assert path.resolve().is_relative_to(into)
            assert path.exists()
    assert sorted(root.rglob("*")) == sorted([root / "a", root / "deep", *(root / "deep").rglob("*")])
    assert [*(root / "deep").iterdir()] in ([], [into])
    assert (root / "a").read_text() == "secret"


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_archive_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    plain = bytearray(
        gzip.decompress(archive(("file", "a/b", "x"), ("file", "ü" * 60, "y"), ("sym", "c", "a/b")))
    )
    for position, value in flips:
        plain[position % len(plain)] = value
    into = tmp_path_factory.mktemp("damaged") / "into"
    try:
        unpack(gzip.compress(bytes(plain)), into)
    except CodeError:
        assert not into.exists()
