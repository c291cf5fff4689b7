"""The folders of compiled code: which one a process uses, and which are removed or repaired. Real locks and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pilotflame.runtime.calls.link.worker_spec import CompiledCode
from pilotflame.runtime.calls.worker import compiled_code

# Takes a folder as a zygote does, prints its path, and uses the folder until stdin ends.
TAKE = """
import sys
from pathlib import Path
from pilotflame.runtime.calls.link.worker_spec import CompiledCode
from pilotflame.runtime.calls.worker.compiled_code import keep_compiled_code, platform
if "shown" in sys.argv:
    print(platform())
    sys.exit()
found = keep_compiled_code(CompiledCode(folder=Path(sys.argv[1]), code=sys.argv[2], limit_bytes=int(sys.argv[3])))
print(Path(found["TORCHINDUCTOR_CACHE_DIR"]).parent, flush=True)
sys.stdin.read()
"""


class Taker:
    """A process that has taken a folder."""

    def __init__(self, root: Path, code: str, limit_bytes: int = 1 << 20) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE, str(root), code, str(limit_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())
        # Make the folders that the compilers would make.
        for name in ("inductor", "triton", "cuda"):
            (self.folder / name).mkdir(exist_ok=True)

    def end(self) -> Path:
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return self.folder


def used(root: Path, code: str, limit_bytes: int = 1 << 20) -> Path:
    """Let a process take a folder and end. Return the folder."""
    return Taker(root, code, limit_bytes).end()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "compiled" / "f"


def test_each_compiler_has_a_folder_that_later_processes_find_again(root: Path) -> None:
    folder = used(root, "a")
    assert folder.parent == root
    assert {path.name for path in folder.iterdir()} == {"inductor", "triton", "cuda", "boot"}
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "inductor" / "kernel.py").write_text("compiled")
    assert used(root, "a") == folder
    assert (folder / "inductor" / "kernel.py").read_text() == "compiled"


def test_another_key_starts_empty_and_the_last_one_stays(root: Path) -> None:
    folders = []
    for number, code in enumerate("abc"):
        folders.append(used(root, code))
        assert not list((folders[-1] / "inductor").iterdir())
        (folders[-1] / "inductor" / "kernel").write_text(code)
        # Set the time of each use, because the clock of the file system may give two uses the same time.
        os.utime(folders[-1], (number, number))
    assert len(set(folders)) == 3
    assert set(root.iterdir()) == set(folders[1:])
    # The last use of a folder decides whether it stays, not the time at which it was made.
    assert used(root, "b") == folders[1]
    os.utime(folders[2], (1, 1))
    last = used(root, "d")
    assert set(root.iterdir()) == {folders[1], last}


def test_what_a_process_uses_stays(root: Path) -> None:
    holder = Taker(root, "a")
    os.utime(holder.folder, (0, 0))
    others = {used(root, code) for code in "bcd"}
    assert holder.folder.exists()
    assert len(others & set(root.iterdir())) == 2
    holder.end()
    used(root, "e")
    assert not holder.folder.exists()


def test_a_removal_that_was_interrupted_is_finished(root: Path) -> None:
    (root / ".0123456789abcdef" / "inductor").mkdir(parents=True)
    folder = used(root, "a")
    assert list(root.iterdir()) == [folder]


def test_more_than_the_limit_is_removed_when_nobody_uses_it(root: Path) -> None:
    folder = used(root, "a")
    (folder / "inductor" / "ab").mkdir()
    large = folder / "inductor" / "ab" / "kernel.so"
    large.write_bytes(b"x" * 100_000)
    holder = Taker(root, "a", 200_000)
    assert large.exists()
    assert used(root, "a", 50_000) == folder
    assert large.exists()
    holder.end()
    used(root, "a", 50_000)
    assert not list((folder / "inductor").iterdir())


def test_a_link_out_of_the_folder_leads_nothing_astray(root: Path, tmp_path: Path) -> None:
    (victim := tmp_path / "victim").mkdir()
    (victim / "large.so").write_bytes(b"x" * 100_000)
    (victim / "empty.so").touch()
    folder = used(root, "a")
    (folder / "inductor" / "out").symlink_to(victim)
    used(root, "a", 50_000)
    assert (folder / "inductor" / "out").is_symlink()
    (folder / "inductor" / "large.so").write_bytes(b"x" * 100_000)
    used(root, "a", 50_000)
    assert not (folder / "inductor" / "out").is_symlink()
    assert {path.name for path in victim.iterdir()} == {"large.so", "empty.so"}


def test_libraries_that_were_not_finished_are_removed(root: Path) -> None:
    inductor = used(root, "a") / "inductor"
    (inductor / "ab" / "cab.main_CxxBuild").mkdir(parents=True)
    (inductor / "cx.h_CxxBuild").mkdir()
    for name in ("ab/cab.main.so", "ab/cab.main.cpp", "ab/cab.so", "cx.h.gch", "cx.h"):
        (inductor / name).write_text("half")
    holder = Taker(root, "a")
    left = {path.name for path in inductor.rglob("*.*") if path.is_file()}
    assert left == {"cab.main.cpp", "cab.so", "cx.h"}
    # While `holder` uses the folder, its process may be compiling the file. So the file stays.
    (inductor / "ab" / "cab.main.so").write_text("half")
    used(root, "a")
    assert (inductor / "ab" / "cab.main.so").exists()
    holder.end()


@pytest.mark.parametrize(
    ("boot", "written_before_s", "stays"),
    [
        ("same", 0, True),
        ("another", 3600, True),
        ("another", 60, False),
        (None, 3600, True),
        (None, 60, False),
    ],
)
def test_what_a_crash_of_the_machine_may_have_damaged_is_removed(
    root: Path, boot: str | None, written_before_s: float, stays: bool
) -> None:
    folder = used(root, "a")
    kernel, lock = folder / "inductor" / "kernel.py", folder / "inductor" / "kernel.lock"
    kernel.write_text("compiled")
    lock.touch()
    ended_s = kernel.stat().st_mtime - 1000
    os.utime(kernel, (0, ended_s - written_before_s))
    assert (folder / "boot").read_text() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if boot is None:
        (folder / "boot").unlink()
    elif boot == "another":
        (folder / "boot").write_bytes(b"\xff" if written_before_s == 60 else b"another")
    os.utime(folder, (0, ended_s))
    used(root, "a")
    assert kernel.exists() is stays
    assert (folder / "boot").read_text() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_end_of_a_zygote_is_noted(root: Path) -> None:
    folder = used(root, "a")
    os.utime(folder, (0, 0))
    compiled_code.note_end(CompiledCode(folder=root, code="a", limit_bytes=1))
    assert folder.stat().st_mtime > 0
    # `note_end` makes no folder for a function that has compiled nothing.
    compiled_code.note_end(CompiledCode(folder=root, code="b", limit_bytes=1))
    assert list(root.iterdir()) == [folder]


def test_a_folder_that_cannot_be_made_is_no_failure(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root.parent.mkdir()
    root.write_text("a file")
    kept = CompiledCode(folder=root, code="a", limit_bytes=1)
    assert compiled_code.keep_compiled_code(kept) == {}
    assert "compiled code is not kept" in capfd.readouterr().err


def shown(path: Path | None = None) -> str:
    """Return the platform as seen by a process that imports from `path` first."""
    environ = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", TAKE, "shown"], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_key_holds_the_versions_of_torch_and_triton(tmp_path: Path) -> None:
    found = {shown()}
    assert shown() in found
    for package, file in (("torch", "version.py"), ("triton", "__init__.py")):
        for version in ("1", "2"):
            (folder := tmp_path / version / package).mkdir(parents=True)
            (folder / "__init__.py").touch()
            (folder / file).write_text(f"__version__ = '{version}'\nassert __name__ is None")
            found.add(shown(tmp_path / version))
    assert len(found) == 5


def test_the_key_holds_the_processor_and_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def platform() -> str:
        return compiled_code.platform.__wrapped__()

    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiled_code, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(compiled_code, "_NVIDIA", tmp_path / "nvidia")
    found = {platform()}
    processor = "processor\t: 0\nflags\t\t: avx2\ncpu MHz\t\t: 2000\n\nprocessor\t: 1\nflags\t\t: avx2\n"
    for text in (processor, processor.replace("avx2", "avx512f")):
        cpuinfo.write_text(text)
        found.add(platform())
    cpuinfo.write_text(cpuinfo.read_text().replace("2000", "2001"))
    assert platform() in found
    assert len(found) == 3
    for number, name in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")):
        (gpu := tmp_path / "nvidia" / "gpus" / str(number)).mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {name}\nIRQ: {number}\n")
        (tmp_path / "nvidia" / "version").write_text("NVRM version: 570.1\n")
        found.add(platform())
    assert len(found) == 5
    (tmp_path / "nvidia" / "version").write_text("NVRM version: 580.1\n")
    assert platform() not in found
    shutil.rmtree(tmp_path / "nvidia")
    assert platform() in found
