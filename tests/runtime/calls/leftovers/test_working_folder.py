"""Each worker has a working directory and a TMPDIR of its own, which end with it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from live import Function, gateway_here, gateway_process, gone, until
from pilotflame.errors import LauncherError
from pilotflame.runtime.calls.leftovers.working_folder import (
    ALL_BYTES,
    ALL_FILES,
    CACHES,
    ENTRY_BYTES,
    ENTRY_FILES,
    WorkingFolder,
)
from pilotflame.runtime.calls.worker.confinement import landlock_version

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FILES = """
import os, pathlib, tempfile, time, uuid
AT_IMPORT = os.path.abspath("kept.txt")
TEMPORARY = tempfile.gettempdir()
def handler(event):
    return globals()[event["do"]](*event.get("with", []))
def where():
    # The other worker gets the next call.
    time.sleep(0.02)
    return {"pid": os.getpid(), "cwd": os.getcwd(), "tmp": tempfile.gettempdir(), "kept": AT_IMPORT, "tmp_at_import": TEMPORARY,
            "files": sorted(os.listdir()), "code": os.path.dirname(__file__)}
def write(path, text):
    pathlib.Path(path).parent.mkdir(exist_ok=True)
    pathlib.Path(path).write_text(text)
def read(path):
    return pathlib.Path(path).read_text()
def around(mine, seconds):
    # Write by each kind of path that a worker may call its own, and look later whether another worker was there.
    places = ["out.txt", "outputs/out.txt", AT_IMPORT, os.path.join(tempfile.gettempdir(), "out.txt"), os.path.join(TEMPORARY, "x")]
    for place in places:
        write(place, mine)
    time.sleep(seconds)
    found = [read(place) for place in places]
    for place in places:
        os.unlink(place)
    return [os.getpid(), found]
def leave(kind):
    if kind == "deep":
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    elif kind == "many":
        for number in range(500):
            pathlib.Path(f"{number}").touch()
    else:
        os.mkdir("closed")
        write("closed/file", "")
        os.chmod("closed/file", 0)
        os.chmod("closed", 0)
        os.symlink(os.path.dirname(__file__), "code")
    return os.getpid()
"""
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
TWO = {"scale.max": 2, "scale.min": 2}


def root_of(cwd: str) -> Path:
    """Return the folder of the worker with this working directory."""
    return Path(cwd).parent


async def pids_of_calls(function: Function, count: int) -> set[int]:
    """Call the function `count` times, up to four calls at once. Fail if a call finds a file of another call.

    Return the workers' pids.
    """
    slots = asyncio.Semaphore(4)

    async def call(number: int) -> int:
        async with slots:
            pid, found = await function.answer({"do": "around", "with": [str(number), 0.001 * (number % 3)]})
        assert set(found) == {str(number)}
        return int(pid)

    return set(await asyncio.gather(*map(call, range(count))))


async def removed(folder: Path) -> None:
    await until(lambda: asyncio.to_thread(lambda: not folder.exists()), f"the end of {folder}")


async def both(function: Function) -> list[dict[str, Any]]:
    """Return each worker's answer about its folders."""
    found: dict[int, dict[str, Any]] = {}

    async def known() -> bool:
        answers = await asyncio.gather(*(function.answer({"do": "where"}) for _ in range(4)))
        found.update({one["pid"]: one for one in answers})
        return len(found) == 2

    await function.settled(ready=2)
    await until(known, "answers of both workers")
    return list(found.values())


async def test_two_workers_find_no_file_of_each_other(deploy: Any) -> None:
    function = await deploy(FILES, TWO)
    await function.settled(ready=2)
    assert len(await pids_of_calls(function, 200)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
async def test_four_workers_that_start_and_end_find_no_file_of_each_other(deploy: Any, killed: bool) -> None:
    """With `killed`, workers are killed during the calls, so folders are also removed while other workers run calls."""
    function = await deploy(FILES, {"scale.max": 4, "scale.idle_timeout_s": 0.05, "idempotent": True})
    folders = root_of((await function.answer({"do": "where"}))["cwd"]).parent
    pids = set[int]()
    for _ in range(10):
        calls = asyncio.create_task(pids_of_calls(function, 500))
        while killed and not calls.done():
            for pid in await function.pids("worker"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.wait([calls], timeout=0.2)
        pids |= await calls
    assert len(pids) > 2
    await function.settled(ready=0)

    async def only_those_of_processes() -> bool:
        left = [path.name for path in folders.iterdir() if path.name != "caches"]
        return all(name.isdecimal() and Path("/proc", name).exists() for name in left)

    await until(only_those_of_processes, "the end of the workers' folders")


async def test_a_worker_has_the_code_in_folders_of_its_own(deploy: Any) -> None:
    function = await deploy(FILES, TWO, files={"notes.txt": "as deployed"})
    one, other = await both(function)
    assert one["files"] == ["gate.py", "handler.py", "notes.txt"]
    for key in ("cwd", "tmp", "kept", "tmp_at_import"):
        assert one[key] != other[key]
    for found in (one, other):
        folder = root_of(found["cwd"])
        assert [Path(found[key]).parent for key in ("tmp", "tmp_at_import")] == [folder, folder]
        assert Path(found["kept"]).parent == Path(found["cwd"])
        assert folder.stat().st_mode & 0o777 == 0o700
    assert one["code"] == other["code"] != one["cwd"]
    (Path(one["cwd"]) / "notes.txt").write_text("edited")
    assert (Path(other["cwd"]) / "notes.txt").read_text() == "as deployed"
    assert (Path(one["code"]) / "notes.txt").read_text() == "as deployed"


RUNPOD = """
import os, time
from pilotflame.runtime.plugins.runpod.sdk import clean, file
def handler(event):
    found = file(f"data:text/plain,{event['text']}")
    time.sleep(event["seconds"])
    with open(found["file_path"]) as opened:
        read = opened.read()
    clean()
    return [os.getpid(), read]
"""


async def test_clean_of_runpod_removes_no_file_of_another_worker(deploy: Any) -> None:
    function = await deploy(RUNPOD, TWO)
    await function.settled(ready=2)

    async def call(number: int) -> int:
        pid, read = await function.answer({"text": f"n{number}", "seconds": 0.002 * (number % 3)})
        assert read == f"n{number}"
        return int(pid)

    assert len(set(await asyncio.gather(*map(call, range(60))))) == 2


COG = """
import time
from cog import BasePredictor, Path
class Predictor(BasePredictor):
    def predict(self, text: str, seconds: float) -> Path:
        Path("out.txt").write_text(text)
        time.sleep(seconds)
        return Path("out.txt")
"""


async def test_an_output_file_of_cog_is_the_callers_own(deploy: Any) -> None:
    function = await deploy(None, {**TWO, "handler": "cog:predict.py:Predictor"}, files={"predict.py": COG})
    await function.settled(ready=2)

    async def call(number: int) -> None:
        answer = await function.answer({"text": "n" * (1 + number), "seconds": 0.002 * (number % 3)})
        assert answer == f"data:text/plain;base64,{_base64('n' * (1 + number))}"

    await asyncio.gather(*map(call, range(60)))


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("kind", ["deep", "many", "closed"])
async def test_the_folder_of_a_worker_that_was_killed_is_removed_whatever_is_in_it(
    deploy: Any, kind: str
) -> None:
    function = await deploy(FILES)
    found = await function.answer({"do": "where"})
    await function.answer({"do": "leave", "with": [kind]})
    os.kill(found["pid"], signal.SIGKILL)
    await gone(found["pid"])
    await removed(root_of(found["cwd"]))
    assert (Path(found["code"]) / "handler.py").exists()
    # The zygote forks further workers, with folders of their own.
    assert (await function.answer({"do": "where"}))["cwd"] != found["cwd"]


async def test_the_folder_of_a_worker_is_removed_at_its_end(deploy: Any) -> None:
    function = await deploy(FILES, {"scale.idle_timeout_s": 0.05})
    found = await function.answer({"do": "where"})
    await function.answer({"do": "write", "with": ["outputs/one", "text"]})
    await gone(found["pid"])
    await removed(root_of(found["cwd"]))


async def test_the_folders_are_removed_after_the_end_of_a_zygote(deploy: Any) -> None:
    function = await deploy(FILES)
    found = await function.answer({"do": "where"})
    (zygote,) = await function.pids("zygote")
    folders = root_of(found["cwd"]).parent
    assert (folders / str(zygote)).exists()
    os.kill(zygote, signal.SIGKILL)
    await gone(found["pid"])
    await removed(root_of(found["cwd"]))
    await removed(folders / str(zygote))


async def test_a_spawned_worker_has_a_folder_of_its_own_too(deploy: Any) -> None:
    function = await deploy(THREAD + FILES)
    found = await function.answer({"do": "where"})
    assert Path(found["cwd"]).name == "work"
    assert found["kept"] == f"{found['cwd']}/kept.txt"
    assert found["files"] == ["gate.py", "handler.py"]
    os.kill(found["pid"], signal.SIGKILL)
    await gone(found["pid"])
    await removed(root_of(found["cwd"]))


async def test_the_next_gateway_removes_what_a_killed_gateway_has_left(state: Path) -> None:
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(FILES)
        found = await function.answer({"do": "where"})
        assert gateway.process is not None
        gateway.process.kill()
        await gateway.process.wait()
        await gone(found["pid"])
    # Do not assert that the folder still exists. A gateway of another test process may have removed it.
    async with gateway_here(state):
        # The gateway removes the folder at its start, before any call.
        await removed(root_of(found["cwd"]))


@pytest.mark.parametrize("first", ["", THREAD], ids=["forked", "spawned"])
async def test_a_handler_keeps_the_working_directory_that_its_import_has_chosen(
    deploy: Any, first: str
) -> None:
    function = await deploy(f"{first}import os\nos.makedirs('inner')\nos.chdir('inner')\n{FILES}")
    found = await function.answer({"do": "where"})
    assert Path(found["cwd"]).name == "inner"
    assert Path(found["cwd"]).parents[1] == Path(found["tmp"]).parent
    assert found["kept"] == f"{found['cwd']}/kept.txt"
    # The import changes to the folder of the code, which all workers share. The worker uses its own folder instead.
    function = await deploy(f"{first}import os\nos.chdir(os.path.dirname(__file__))\n{FILES}")
    found = await function.answer({"do": "where"})
    assert Path(found["cwd"]).parent == Path(found["tmp"]).parent


async def test_a_folder_for_temporary_files_that_the_function_has_chosen_stays(
    deploy: Any, tmp_path: Path
) -> None:
    function = await deploy(FILES, {"env.TMPDIR": str(tmp_path)})
    found = await function.answer({"do": "where"})
    assert (found["tmp"], found["tmp_at_import"]) == (str(tmp_path), str(tmp_path))


async def test_what_the_import_writes_is_in_the_folder_of_each_worker(deploy: Any) -> None:
    source = (
        "import pathlib, tempfile\nDATA = tempfile.mkdtemp()\npathlib.Path(DATA, 'one').write_text('x')\n"
    )
    source += "pathlib.Path('log.txt').write_text('begun')\n" + FILES
    source += "def data():\n    return DATA\n"
    function = await deploy(source, TWO)
    one, other = await both(function)
    assert "log.txt" in one["files"]
    assert not (Path(one["code"]) / "log.txt").exists()
    (Path(one["cwd"]) / "log.txt").write_text("changed")
    assert (Path(other["cwd"]) / "log.txt").read_text() == "begun"
    data = Path(await function.answer({"do": "data"}))
    assert data.parent in (Path(one["tmp"]), Path(other["tmp"]))
    assert (data / "one").read_text() == "x"


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
async def test_a_function_with_private_files_may_write_by_relative_path(deploy: Any) -> None:
    function = await deploy(FILES, {"resources.files": "private"})
    await function.answer({"do": "write", "with": ["outputs/one", "text"]})
    assert await function.answer({"do": "read", "with": ["outputs/one"]}) == "text"
    found = await function.answer({"do": "where"})
    os.kill(found["pid"], signal.SIGKILL)
    await gone(found["pid"])
    await removed(root_of(found["cwd"]))


# -- what is in a working directory


class Folders:
    """The code folder of a function, and the root folder in which this process makes its working folder."""

    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "code").mkdir()
        self.root, self.code = tmp_path / "root", tmp_path / "code"

    def write(self, name: str, size: int = 1) -> None:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))

    def make(self) -> WorkingFolder:
        return WorkingFolder.of_code(str(self.root), self.code)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    monkeypatch.chdir(tmp_path)
    for variable in ("TMPDIR", *CACHES):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    return Folders(tmp_path)


async def test_small_entries_are_copied_and_large_ones_are_links(folders: Folders) -> None:
    folders.write("small", ENTRY_BYTES)
    folders.write("large", ENTRY_BYTES + 1)
    folders.write("few/inner/file")
    for number in range(ENTRY_FILES):
        folders.write(f"many/{number}")
    folders.write("__pycache__/small.pyc")
    os.mkfifo(folders.code / "pipe")
    (folders.code / "small").chmod(0o755)
    work = Path(folders.make().work)
    found = {path.name: path.is_symlink() for path in work.iterdir()}
    assert found == {"small": False, "large": True, "few": False, "many": True, "pipe": True}
    assert (work / "few" / "inner" / "file").is_file()
    small, code = (work / "small").stat(), (folders.code / "small").stat()
    assert (small.st_mode, small.st_size, small.st_mtime_ns) == (code.st_mode, code.st_size, code.st_mtime_ns)


async def test_the_copies_of_a_working_directory_are_limited(folders: Folders) -> None:
    for number in range(ALL_FILES + 10):
        folders.write(f"{number:03}")
    work = Path(folders.make().work)
    copied = [path.name for path in work.iterdir() if not path.is_symlink()]
    assert len(copied) == ALL_FILES
    assert len(list(work.iterdir())) == ALL_FILES + 10


async def test_the_bytes_of_copies_are_limited(folders: Folders) -> None:
    for number in range(6):
        folders.write(str(number), ENTRY_BYTES)
    work = Path(folders.make().work)
    assert sum(not path.is_symlink() for path in work.iterdir()) == ALL_BYTES // ENTRY_BYTES


async def test_a_full_disk_leaves_links(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    folders.write("file")
    folders.write("inner/file")
    monkeypatch.setattr(os, "write", full)
    work = Path(folders.make().work)
    assert {path.name: path.readlink() for path in work.iterdir()} == {
        name: folders.code / name for name in ("file", "inner")
    }


async def test_a_folder_that_cannot_be_made_is_refused_with_its_name(folders: Folders) -> None:
    folders.root.rmdir()
    folders.root.touch()
    with pytest.raises(LauncherError, match=r"no working folder: .*root"):
        folders.make()
