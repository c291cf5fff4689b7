"""Functions in containers: from zero and back, isolation, limits, and ends of every kind. Real podman, real images."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from containers import Engine, made_image, podman, require_podman, running_engine
from launcher_tests import LauncherTests
from live import Function, Gateway, failure, gateway_here, gateway_process, gone, short_folder, until
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.node.launching.container_launcher import ContainerLauncher
from pilotflame.runtime.node.launching.listener import Listener

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

HANDLER = """
import os, resource
def handler(event):
    what = event.get("do")
    if what == "write":
        with open(event["path"], "wb") as file:
            file.write(b"x" * event.get("bytes", 1))
        return "written"
    if what == "limits":
        return {"nproc": resource.getrlimit(resource.RLIMIT_NPROC)}
    if what == "die":
        os._exit(3)
    return {"pid": os.getpid(), "capabilities": capabilities(), "echo": event,
            "code": os.path.dirname(__file__)}
def capabilities():
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff"))
"""
STREAM = """
def handler(event):
    for number in range(event["count"]):
        yield number
"""
PREDICT = """
from cog import BasePredictor, Path
class Predictor(BasePredictor):
    def predict(self, files: list[Path]) -> str:
        return "".join(file.read_text() + file.suffix for file in files)
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    require_podman()
    with short_folder() as folder, running_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    return made_image()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(engine: Engine) -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", engine=engine.url) as found:
            yield found
        assert containers(folder / "state") == []


def containers(state: Path, function: Function | None = None, *, every: bool = True) -> list[dict[str, Any]]:
    """Return podman's list of the containers of a gateway, or of one of its functions. Without `every`, leave out containers that do not run."""
    labels = {"gateway": str(state)} | ({"function": function.name} if function is not None else {})
    filters = [f"--filter=label=pilotflame.{name}={value}" for name, value in labels.items()]
    return list(json.loads(podman("ps", *(["-a"] if every else []), *filters, "--format", "json") or "[]"))


async def exception(function: Function, event: dict[str, Any]) -> str:
    """Return the type of the exception that the handler raises for `event`."""
    error = await function.error(event)
    assert error["type"] == "handler_failed", error
    found = re.search(r"\w+Error", error["message"])
    assert found is not None, error
    return found[0]


async def deployed(gateway: Gateway, image: str, handler: str = HANDLER, **settings: Any) -> Function:
    fixed = {"image.name": image, "scale.idle_timeout_s": 30} | settings
    return await gateway.deploy(handler, fixed)


class TestContainerLauncher(LauncherTests):
    @pytest.fixture
    def make_spec(self, image: str, tmp_path: Path) -> Callable[[str], WorkerSpec]:
        def make(source: str) -> WorkerSpec:
            code = tmp_path / f"code-{len([*tmp_path.iterdir()])}"
            code.mkdir()
            (code / "handler.py").write_text(source)
            return WorkerSpec(function="tone", revision=f"1-{code.name}", code=code, image=image)

        return make

    @pytest_asyncio.fixture(loop_scope="module")
    async def launcher(self, engine: Engine, state: Path) -> AsyncIterator[ContainerLauncher]:
        state.mkdir()
        listener = Listener(state / "run" / "link.sock")
        listener.open()
        async with BackgroundTasks() as tasks:
            launcher = ContainerLauncher(engine.url, listener, tasks, str(state), print)
            yield launcher
            await launcher.close()
            listener.close()
        assert tasks.failures == {}
        assert containers(state) == []


async def test_from_zero_in_a_container_and_back(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image, **{"scale.idle_timeout_s": 0.2})
    await function.settled(ready=0)
    (container,) = containers(gateway.state, function)
    for _ in range(10):
        response = await function.call({"n": 1})
        assert response.status_code == 200, response.text
        assert response.headers["X-Cold-Start"] == "true"
        answer = response.json()
        assert answer["echo"] == {"n": 1}
        assert answer["pid"] < 1000
        await function.settled(ready=0)
    # One container served all calls. Its first process is a base, whose memory `list` counts with the other bases.
    listed = (await gateway.client.get("/v1/functions", params={"memory": "1"})).json()
    assert listed["memory"]["bases_bytes"] > 1e6
    assert [found["Id"] for found in containers(gateway.state, function)] == [container["Id"]]
    await gateway.client.delete(f"/v1/functions/{function.name}")
    assert containers(gateway.state, function) == []


async def test_an_uploaded_file_reaches_a_container(gateway: Gateway, image: str) -> None:
    settings = {"image.name": image, "max_body_bytes": 2000}
    response = await gateway.send(None, settings, files={"predict.py": PREDICT})
    assert response.status_code == 201, response.text
    body: dict[str, Any] = {"version": response.json()["name"]}
    for content, status, found in ((b"content", 201, "content.md"), (b"x" * 1600, 413, "in a container")):
        upload = {"content": ("notes.md", content, "text/markdown")}
        file = (await gateway.client.post("/replicate/v1/files", files=upload)).json()
        body["input"] = {"files": [file["urls"]["get"]]}
        response = await gateway.client.post(
            "/replicate/v1/predictions", json=body, headers={"Prefer": "wait"}
        )
        assert response.status_code == status, response.text
        assert found in (response.json().get("output") or response.json()["detail"])


async def test_a_worker_has_no_rights(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image)
    assert int((await function.answer({}))["capabilities"], 16) == 0
    code = (await function.answer({}))["code"]
    for path in ("/etc/passwd", f"{code}/x", "/usr/local/lib/x"):
        assert await exception(function, {"do": "write", "path": path}) in {"OSError", "FileNotFoundError"}
    assert await function.answer({"do": "write", "path": "/tmp/x", "bytes": 1000}) == "written"


async def test_a_dead_worker_is_replaced_and_its_end_is_told(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image)
    error = await function.error({"do": "die"})
    assert error["type"] == "worker_died"
    assert "exit code 3" in error["message"]
    assert (await function.answer({}))["echo"] == {}


async def test_a_killed_container_is_replaced(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image)
    assert (await function.answer({}))["echo"] == {}
    (container,) = containers(gateway.state, function)
    podman("kill", container["Id"])
    assert (await function.answer({"again": True}))["echo"] == {"again": True}
    (other,) = containers(gateway.state, function, every=False)
    assert other["Id"] != container["Id"]


async def test_a_restart_has_a_container_of_its_own(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image)
    assert (await function.answer({"n": 1}))["echo"] == {"n": 1}
    (before,) = containers(gateway.state, function)
    calling, answers = True, []

    async def call() -> None:
        while calling:
            answers.append(await function.call({"n": len(answers)}))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call())
        for _ in range(2):
            response = await gateway.client.post(f"/v1/functions/{function.name}/restart")
            assert response.status_code < 300, response.text

            async def replaced() -> bool:
                return len(containers(gateway.state, function)) == 1

            await until(replaced, "the end of the old container")
            answers.append(await function.call({}))
        calling = False
    assert {answer.status_code for answer in answers} == {200}
    (after,) = containers(gateway.state, function)
    assert after["Id"] != before["Id"]


async def test_a_dead_zygote_takes_its_container_along(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image)
    assert (await function.answer({"n": 1}))["echo"] == {"n": 1}
    (before,) = containers(gateway.state, function)
    first, found = psutil.Process(before["Pid"]), list[psutil.Process]()

    async def named() -> bool:
        titles = {process: " ".join(process.cmdline()) for process in first.children(recursive=True)}
        zygotes = [process for process, title in titles.items() if f"zygote {function.name}" in title]
        # On a busy machine, there may be two workers. Use one of them.
        workers = [process for process, title in titles.items() if "worker" in title]
        found[:] = [*zygotes, *workers[:1]]
        return bool(zygotes and workers)

    # A process gets its title a moment after its start.
    await until(named, "a zygote and a worker")
    zygote, worker = found
    zygote.kill()
    await gone(worker.pid)

    async def replaced() -> bool:
        return [one["Id"] for one in containers(gateway.state, function)] not in ([before["Id"]], [])

    await until(replaced, "another container")
    assert (await function.answer({"n": 2}))["echo"] == {"n": 2}
    (after,) = containers(gateway.state, function)
    assert after["Id"] != before["Id"]


async def test_the_limit_of_processes_is_the_containers_and_not_the_users(
    gateway: Gateway, image: str
) -> None:
    function = await deployed(gateway, image)
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    for limit in (await function.answer({"do": "limits"}))["nproc"]:
        assert limit == min(hard, int(Path("/proc/sys/kernel/pid_max").read_text()))


async def test_streams_and_three_workers(gateway: Gateway, image: str) -> None:
    function = await deployed(gateway, image, STREAM, **{"scale.max": 3})
    response = await function.call({"count": 5})
    assert response.text.count("data:") >= 5
    await gateway.client.post(f"/v2/{function.name}/warmup", params={"workers": "3"})
    await function.settled(ready=3)


async def test_the_engine_is_restarted_meanwhile(gateway: Gateway, image: str, engine: Engine) -> None:
    function = await deployed(gateway, image, **{"scale.idle_timeout_s": 0.2})
    engine.stop()
    assert (await function.answer({"n": 1}))["echo"] == {"n": 1}
    await function.settled(ready=0)
    assert (await function.answer({"n": 2}))["echo"] == {"n": 2}
    engine.start()
    await gateway.client.delete(f"/v1/functions/{function.name}")
    assert containers(gateway.state, function) == []


async def test_what_cannot_start_says_why(
    gateway: Gateway, image: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await gateway.send(HANDLER, {"image.name": "localhost/no-such-image"})
    assert response.status_code == 500
    assert "no-such-image" in failure(response)["message"]
    response = await gateway.send("import no_such_module\n" + HANDLER, {"image.name": image})
    assert "no_such_module" in failure(response)["message"]
    async with gateway_here(state, engine=f"unix://{state}/none.sock") as other:
        response = await other.send(HANDLER, {"image.name": image})
        assert "cannot be reached" in failure(response)["message"]
    for url in ("/var/run/docker.sock", "ssh://"):
        monkeypatch.setenv("DOCKER_HOST", url)
        async with gateway_here(state) as other:
            response = await other.send(HANDLER, {"image.name": image})
            assert "DOCKER_HOST" in failure(response)["message"]


async def test_a_killed_gateways_containers_are_removed_by_the_next(
    engine: Engine, image: str, state: Path
) -> None:
    async with gateway_process(state, engine=engine.url) as first:
        function = await deployed(first, image)
        (left,) = containers(state)
        assert first.process is not None
        os.kill(first.process.pid, signal.SIGKILL)
        await first.process.wait()
    async with gateway_process(state, engine=engine.url) as second:

        async def removed() -> bool:
            return left["Id"] not in {found["Id"] for found in containers(state)}

        await until(removed, "the end of the first gateway's container")
        assert (await second.function(function.name).answer({"n": 1}))["echo"] == {"n": 1}
        assert len(containers(state)) == 1
        assert second.process is not None
        second.process.terminate()
        await second.process.wait()
    assert containers(state) == []
