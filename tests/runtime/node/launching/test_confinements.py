"""The limits of a function's processes: cgroups, folders for temporary files, and Landlock."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Function, failure, gateway_here, gateway_process, gone, until
from pilotflame.errors import LauncherError, PilotflameError
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.calls.worker.confinement import landlock_version
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.node.launching import cgroups
from pilotflame.runtime.node.launching.confinements import Confinements
from pilotflame.runtime.node.launching.listener import Listener
from pilotflame.runtime.node.launching.nvidia_gpus import NvidiaDriver
from pilotflame.runtime.node.launching.process_launcher import ProcessLauncher
from pilotflame.runtime.node.reconciling.gpu_bookings import GpuBookings
from pilotflame.runtime.node.reconciling.standby import Standby
from pilotflame.runtime.node.reconciling.zygote_supervisor import ZygoteSupervisor

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

HANDLER = """
import ctypes, os, pathlib, socket, subprocess, tempfile, time
def handler(event):
    return globals()[event["do"]](*event.get("with", []))
def eat(mb):
    return len(bytearray(b"x") * (mb << 20))
def fork(most=1000):
    children = 0
    try:
        while children < most:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            children += 1
    except OSError as error:
        return [children, type(error).__name__]
def spin(seconds):
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + seconds:
        pass
    return (time.process_time() - used) / seconds
def write(path, count=1):
    pathlib.Path(path).write_bytes(b"x" * count)
def read(path):
    return pathlib.Path(path).read_bytes().decode(errors="replace")
def list(path):
    return os.listdir(path)
def tmp():
    return [tempfile.gettempdir(), tempfile.mkstemp()[1]]
def kill(pid):
    os.kill(pid, 0)
def child():
    return subprocess.run(["cat", __file__], capture_output=True, check=True).stdout.decode()
def pid():
    return os.getpid()
def ask_home(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(b"POST /v1/keys HTTP/1.0\\r\\nHost: localhost\\r\\nContent-Length: 12\\r\\n\\r\\n{\\"name\\":\\"x\\"}")
    return sock.recv(4096).decode()
"""

with_cgroups = pytest.mark.skipif(
    {one.name for one in cgroups.find_controllers()} != {*cgroups.CONTROLLERS, cgroups.COUNTER},
    reason="this user may make no cgroups here",
)
with_landlock = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")


async def raised(function: Function, do: str, *given: Any) -> str:
    error = await function.error({"do": do, "with": given})
    assert error["type"] == "handler_failed", error
    return str(error["message"])


@with_cgroups
async def test_a_handler_that_takes_too_much_is_stopped_and_its_neighbour_is_not(
    deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "PIDS", 40)
    limits = {"resources.memory_mb": 200, "resources.cpus": 0.25}
    function = await deploy(HANDLER, {**limits, "scale.idle_timeout_s": 30})
    neighbour = await deploy(HANDLER)
    error, found = await asyncio.gather(
        function.error({"do": "eat", "with": [600]}), neighbour.answer({"do": "eat", "with": [220]})
    )
    assert found == 220 << 20
    assert (error["status"], error["type"]) == (500, "out_of_memory")
    assert "resources.memory_mb of the function is 200" in error["message"]
    assert "resources.memory_mb" in error["remedy"]
    assert error["details"]["memory_mb"] == 200
    (children, why), pid = await asyncio.gather(
        function.answer({"do": "fork"}), neighbour.answer({"do": "pid"})
    )
    assert (children < 40, why) == (True, "BlockingIOError")
    assert pid > 0
    assert await function.answer({"do": "spin", "with": [0.8]}) < 0.5
    # Processes that the handler forked end when the function is deleted, and the function's cgroup is removed.
    (worker,) = await function.pids("worker")
    (joined,) = {
        line.rpartition("/")[2]
        for line in Path(f"/proc/{worker}/cgroup").read_text().splitlines()
        if "pilotflame-" in line
    }
    left = psutil.Process(worker).children()
    await function.client.delete(f"/v1/functions/{function.name}")
    for process in left:
        await gone(process.pid)
    assert not [one for one in cgroups.find_controllers() if (one.folder / joined).exists()]


async def test_each_function_has_a_folder_for_temporary_files_that_goes_with_it(deploy) -> None:
    function, neighbour = [await deploy(HANDLER) for _ in range(2)]
    folder, file = await function.answer({"do": "tmp"})
    other, _ = await neighbour.answer({"do": "tmp"})
    assert folder != other
    assert Path(file).parent == Path(folder)
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    await function.client.delete(f"/v1/functions/{function.name}")
    await until(lambda: asyncio.to_thread(lambda: not Path(folder).exists()), "the end of the folder")
    assert Path(other).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount file systems")
async def test_temporary_files_are_limited(deploy) -> None:
    function = await deploy(HANDLER, {"resources.tmp_mb": 4})
    folder, _ = await function.answer({"do": "tmp"})
    assert await function.answer({"do": "write", "with": [f"{folder}/small", 1 << 20]}) is None
    assert "No space left" in await raised(function, "write", f"{folder}/large", 8 << 20)
    await function.client.delete(f"/v1/functions/{function.name}")
    await until(lambda: asyncio.to_thread(lambda: not Path(folder).exists()), "the end of the folder")


@with_cgroups
async def test_a_handler_that_needs_too_much_to_be_imported_is_told_why(gateway) -> None:
    response = await gateway.send(
        "held = bytearray(b'x') * (100 << 20)\n" + HANDLER, {"resources.memory_mb": 32}
    )
    error = failure(response)
    assert error["type"] == "launcher_error"
    assert "sent by the kernel because memory ran out" in error["message"]
    assert "Raise resources.memory_mb, which is 32" in error["remedy"]


async def test_a_crashed_worker_leaves_no_file_with_its_memory(deploy) -> None:
    limit = "import resource\ndef handler(event):\n    return resource.getrlimit(resource.RLIMIT_CORE)[0]"
    assert await (await deploy(limit)).answer() == 0


@pytest.fixture
def tmp_root(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the confinements of a gateway with `state` make their folders for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Confinements(state, tmp_path / "cache").tmp_root


def spec_of(**resources: Any) -> WorkerSpec:
    return WorkerSpec(function="f", revision="r1-x", code=Path("/nowhere"), resources=Resources(**resources))


async def test_confinements_that_threads_make_at_once_stay(state: Path, tmp_root: Path) -> None:
    for _ in range(20):
        confinements, together = Confinements(state, state), threading.Barrier(8)

        def make(_: int, one: Confinements = confinements, start: threading.Barrier = together) -> object:
            start.wait()
            return one.make(spec_of()).tmp

        with ThreadPoolExecutor(9) as threads:
            threads.submit(confinements.remove_left)
            made = set(threads.map(make, range(8)))
        assert {*tmp_root.iterdir()} == made
        assert len(made) == 8
        confinements.close()


async def test_a_folder_that_another_user_made_first_is_not_used(state: Path, tmp_root: Path) -> None:
    tmp_root.mkdir(0o755)
    confinements = Confinements(state, state)
    assert confinements.make(spec_of()).tmp is None
    with pytest.raises(LauncherError, match="belongs to another user"):
        confinements.make(spec_of(tmp_mb=1))


async def test_the_folders_are_locked_while_the_gateway_runs(state: Path, tmp_root: Path) -> None:
    confinements = Confinements(state, state)
    made = confinements.make(spec_of())
    # systemd-tmpfiles needs this lock before it removes old files, so it skips the locked folder.
    descriptor = os.open(tmp_root, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    confinements.remove(made)
    confinements.close()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount file systems")
async def test_a_folder_in_use_is_removed_too(state: Path, tmp_root: Path) -> None:
    confinements = Confinements(state, state)
    made = confinements.make(spec_of(tmp_mb=1))
    assert made.tmp is not None
    with (made.tmp / "open").open("w"):
        confinements.remove(made)
        assert not made.tmp.exists()


@contextlib.asynccontextmanager
async def launcher_of(state: Path) -> AsyncIterator[ProcessLauncher]:
    listener = Listener(state / "run" / "link.sock")
    listener.open()
    async with asyncio.TaskGroup() as tasks:
        launcher = ProcessLauncher(listener, tasks, state, state / "cache")
        try:
            yield launcher
        finally:
            await launcher.close()
            listener.close()


class _Claimant:
    """A revision without GPUs."""

    gpu_need = None

    def renew_standby(self) -> bool:
        return False


async def test_a_revision_that_is_closed_while_its_base_starts_leaves_nothing(
    state: Path, tmp_root: Path
) -> None:
    async with launcher_of(state) as launcher, asyncio.TaskGroup() as tasks:
        logs, names, spec = LogChannel(), iter(["zygote-test"]), spec_of()
        standby = Standby(
            GpuBookings((), NvidiaDriver()), _Claimant(), names, logs, tasks, lambda: None, wanted=False
        )
        supervisor = ZygoteSupervisor(
            spec, launcher, logs, tasks, dict, names, standby, lambda: None, lambda: None, stays=True
        )
        opening = asyncio.create_task(supervisor.open())
        await asyncio.sleep(0)
        supervisor.close()
        await supervisor.wait_closed()
        # The open fails because there is no code, or because the zygote was closed first.
        with pytest.raises(PilotflameError):
            await opening
        assert not [*tmp_root.iterdir()]
        assert not launcher.base_pids()


async def test_what_a_cancelled_launch_makes_is_removed(state: Path, tmp_root: Path) -> None:
    async with launcher_of(state) as launcher:
        await launcher.prepare(spec := spec_of())
        launching = asyncio.create_task(launcher.launch(spec, LogChannel(), lambda: None))
        await asyncio.sleep(0)
        launching.cancel()
        await launcher.forget(spec)
        assert tmp_root.exists()
        assert not [*tmp_root.iterdir()]


@with_landlock
async def test_private_files_hide_the_gateway_and_other_functions(gateway, deploy, tmp_path: Path) -> None:
    other = await deploy("SECRET = 'of another'\n" + HANDLER)
    secret = f"/v1/functions/{other.name}/secrets/TOKEN"
    assert (await other.client.put(secret, json={"value": "hush"})).status_code < 300
    function = await deploy(HANDLER, {"resources.files": "private", "scale.idle_timeout_s": 30})
    code = next((gateway.state / "functions" / other.name).rglob("handler.py"))
    hidden = [code, *(path for path in gateway.state.rglob("*.json*"))]
    assert len(hidden) > 3
    for path in hidden:
        if function.name not in path.parts:
            assert "Permission denied" in await raised(function, "read", str(path)), path
    for folder in (gateway.state, gateway.state / "functions", gateway.state / "files"):
        assert "denied" in await raised(function, "list", str(folder))
    # A handler may read an uploaded file whose name it knows, because the gateway tells workers these names.
    (gateway.state / "files" / "name-that-is-known").write_text("uploaded")
    known = str(gateway.state / "files" / "name-that-is-known")
    assert await function.answer({"do": "read", "with": [known]}) == "uploaded"
    # The handler can read its own code and other files of the machine, and run programs.
    assert "def handler" in await function.answer({"do": "child"})
    assert "root" in await function.answer({"do": "read", "with": ["/etc/passwd"]})
    own = next((gateway.state / "functions" / function.name).rglob("handler.py"))
    fresh = f"pf-{uuid.uuid4()}"
    for path in (tmp_path / "x", own.parent / "x", f"/dev/shm/{fresh}", f"/tmp/{fresh}", own):
        assert "denied" in await raised(function, "write", str(path)), path
    folder, file = await function.answer({"do": "tmp"})
    assert file.startswith(folder)
    for pid in (os.getpid(), (await other.pids("zygote"))[0]):
        assert "denied" in await raised(function, "read", f"/proc/{pid}/environ")
        assert "denied" in await raised(function, "list", f"/proc/{pid}/root")
    if landlock_version() >= 6:
        assert "not permitted" in await raised(function, "kill", os.getpid())
    # A function without private files can read the code.
    assert "of another" in await other.answer({"do": "read", "with": [str(code)]})


@with_landlock
async def test_private_files_hide_the_weights_of_other_functions(state: Path) -> None:
    (cache := state.parent / "cache").mkdir()
    (cache / "weights").write_text("of another")
    with tempfile.NamedTemporaryFile("w", dir="/dev/shm") as shared:
        async with gateway_here(state, cache_dir=cache, drain_s=1.0) as gateway:
            function = await gateway.deploy(HANDLER, {"resources.files": "private"})
            for path in (cache / "weights", shared.name):
                assert "Permission denied" in await raised(function, "read", str(path)), path


@with_landlock
async def test_private_files_hide_the_key_of_the_control_socket(state: Path) -> None:
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway:
        async with gateway.at_home() as home:
            made = await home.post("/v1/keys", json={"name": "x", "scopes": ["admin"]})
        gateway.client.headers["Authorization"] = f"Bearer {made.json()['key']}"
        function = await gateway.deploy(HANDLER, {"resources.files": "private"})
        run = state / "run"
        # Landlock does not restrict `connect`, so the handler reaches the socket. Without the key, the gateway refuses the request.
        answer = await function.answer({"do": "ask_home", "with": [str(run / "own.sock")]})
        assert answer.startswith("HTTP/1.0 401 "), answer
        assert "denied" in await raised(function, "read", str(run / "own.key"))


@with_landlock
@with_cgroups
async def test_workers_that_are_spawned_are_confined_too(gateway, deploy) -> None:
    threads = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    settings = {"resources.files": "private", "resources.memory_mb": 200}
    function = await deploy(threads + HANDLER, settings)
    assert function.described["warnings"]
    assert "denied" in await raised(function, "list", str(gateway.state))
    assert (await function.error({"do": "eat", "with": [600]}))["type"] == "out_of_memory"


@with_cgroups
async def test_a_process_that_cannot_be_confined_says_why(deploy) -> None:
    settings = {"resources.memory_mb": 200, "scale.rest": "local", "scale.idle_timeout_s": 0.1}
    function = await deploy(HANDLER, settings)
    (worker,) = {await function.answer({"do": "pid"})}
    lines = Path(f"/proc/{worker}/cgroup").read_text().splitlines()
    (joined,) = {line.rpartition("/")[2] for line in lines if "pilotflame-" in line}
    await gone(worker)
    groups = [group for one in cgroups.find_controllers() if (group := one.folder / joined).exists()]

    async def removed() -> bool:
        # Try again: the kernel removes a group only after the zygote, which is about to end, has ended.
        for group in list(groups):
            with contextlib.suppress(OSError):
                group.rmdir()
                groups.remove(group)
        return not groups

    await until(removed, "the end of the zygote")
    error = await function.error({"do": "pid"})
    assert "cannot be confined: No such file or directory" in error["message"], error
    assert joined in error["message"]


async def test_what_cannot_be_held_is_refused(gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "find_controllers", list)
    response = await gateway.send(HANDLER, {"resources.memory_mb": 200, "resources.cpus": 1.0})
    error = failure(response)
    assert "resources.cpus and resources.memory_mb cannot be held" in error["message"]
    assert "Delegate=yes" in error["remedy"]
    response = await gateway.send(HANDLER, {"resources.network": "none"})
    assert "resources.network" in failure(response)["message"]


@with_cgroups
async def test_what_a_killed_gateway_left_is_removed_by_the_next(state: Path) -> None:
    async with gateway_process(state) as first:
        function = await first.deploy(HANDLER, {"resources.memory_mb": 200, "name": "left"})
        folder, _ = await function.answer({"do": "tmp"})
        await function.answer({"do": "fork", "with": [20]})
        prefix = Path(folder).parents[2].name
        assert first.process is not None
        os.kill(first.process.pid, signal.SIGKILL)
        await first.process.wait()
    (place,) = {one.folder for one in cgroups.find_controllers() if one.name == "pids"}
    (group,) = place.glob(f"{prefix}*")
    # The processes end by themselves when they notice the end of the gateway. The next gateway removes the folders.
    left = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    async with gateway_here(state) as second:
        assert (await second.function(function.name).answer({"do": "pid"})) > 0
        assert not Path(folder).exists()
        assert not group.exists()
        for pid in left:
            await gone(pid)
    assert not list(place.glob(f"{prefix}*"))
    assert not Path(folder).parents[2].exists()
