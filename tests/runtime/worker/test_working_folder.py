"""Each worker has a working directory and a TMPDIR of its own, which end with it."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live import Function, gateway_here, gateway_process, gone, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300),
    pytest.mark.xfail(strict=True, reason="The workers of a revision share their working directory and TMPDIR."),
]  # fmt: skip

FILES = """
import os, pathlib, tempfile, time, uuid
AT_IMPORT = os.path.abspath("kept.txt")
TEMPORARY = tempfile.gettempdir()
def handler(event):
    return globals()[event["do"]](*event.get("with", []))
def where():
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
    """The folder of the worker with this working directory."""
    return Path(cwd).parent


async def pids_of_calls(function: Function, count: int) -> set[int]:
    """Call it `count` times, up to four at once. Fail if a call finds a file of another. Return the workers' pids."""
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
    """Return what both workers tell about their folders."""
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


@pytest.mark.parametrize("kind", ["many", "closed"])
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
    function = await deploy(FILES, {"scale.idle_timeout_s": 0.05, "scale.standby": False})
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
    assert root_of(found["cwd"]).exists()
    async with gateway_here(state):
        # No function is called.
        await removed(root_of(found["cwd"]))
