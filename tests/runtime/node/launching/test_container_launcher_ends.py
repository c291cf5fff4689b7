"""Containers that end too early: a deploy is cancelled, a base dies, a user removes one, the engine hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from containers import BROKEN, Engine, made_image, podman, require_podman, running_engine, scripted_engine
from live import short_folder
from pilotflame.errors import LauncherError
from pilotflame.runtime.calls.link.worker_spec import Weights, WorkerSpec
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.node.launching import container_launcher
from pilotflame.runtime.node.launching.container_launcher import ContainerLauncher
from pilotflame.runtime.node.launching.listener import Listener
from pilotflame.snapshot.caching.flock import locked_file
from pilotflame.snapshot.caching.stored import MOUNTED
from pulling import LIMIT_S, make

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    require_podman()
    with short_folder() as folder, running_engine(folder) as engine:
        yield engine


@asynccontextmanager
async def launching(url: str, state: Path, log: list[str]) -> AsyncIterator[ContainerLauncher]:
    """Yield a launcher, and close it afterwards. Check that no background task has failed."""
    listener = Listener(state / "run" / "link.sock")
    listener.open()
    try:
        async with BackgroundTasks() as tasks:
            launcher = ContainerLauncher(url, listener, tasks, str(state), log.append)
            try:
                yield launcher
            finally:
                await launcher.close()
            assert tasks.failures == {}
    finally:
        listener.close()


@asynccontextmanager
async def hanging_engine(folder: Path) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the URL of an engine that never creates a container, and an event that is set when a container is requested."""
    asked, ended = asyncio.Event(), asyncio.Event()

    async def create(_request: web.Request) -> web.StreamResponse:
        asked.set()
        await ended.wait()
        return web.json_response({"message": "it hung"}, status=500)

    async with scripted_engine(folder, create, {"ApiVersion": "1.43"}) as url:
        try:
            yield url, asked
        finally:
            ended.set()


def code(state: Path) -> Path:
    (state / "code").mkdir(parents=True)
    (state / "code" / "handler.py").write_text("def handler(event):\n    return event\n")
    return state / "code"


async def test_a_gateway_that_closes_does_not_wait_for_an_engine_that_hangs(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_launcher, "LAST_START_TIMEOUT_S", 0.2)
    spec = WorkerSpec(function="f", revision="1-x", code=code(state), image="any")
    async with hanging_engine(state) as (url, asked), launching(url, state, []) as launcher:
        launch = asyncio.create_task(launcher.launch(spec, LogChannel(), lambda: None))
        async with asyncio.timeout(LIMIT_S):
            await asked.wait()
        async with asyncio.timeout(10):
            await launcher.close()
            with pytest.raises(LauncherError, match="shutting down"):
                await launch


async def test_a_cancelled_launch_lets_the_cache_go(state: Path) -> None:
    """A lock that the launch kept would keep the files in the cache, and an open file would keep the folder."""
    manifest = make(state / "origin")
    cache = state / "cache"
    cache.mkdir()
    origin = state / "origin"
    weights = Weights(root=origin, manifest=origin, source="s3://bucket/net", cache=cache)
    spec = WorkerSpec(function="f", revision="1-x", code=code(state), image="any", weights=(weights,))
    folder = cache / "snapshots" / manifest.digest
    async with hanging_engine(state) as (url, _), launching(url, state, []) as launcher:
        await launcher.prepare(spec)
        # The launch cannot make the folders while the tier is locked, so it is cancelled before it has made them.
        with locked_file(cache / "lock"):
            launch = asyncio.create_task(launcher.launch(spec, LogChannel(), lambda: None))
            await asyncio.sleep(0.2)
            launch.cancel()
            await asyncio.wait([launch], timeout=LIMIT_S)
        assert launch.cancelled()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert str(folder / MOUNTED) not in {opened.path for opened in psutil.Process().open_files()}
    assert not folder.exists()


async def test_a_base_that_dies_of_an_import_says_of_which(engine: Engine, state: Path) -> None:
    spec = WorkerSpec(function="f", revision="1-x", code=code(state), image=made_image(), preload=(BROKEN,))
    async with launching(engine.url, state, []) as launcher:
        with pytest.raises(
            LauncherError, match=r"code 1 before (?s:.*)broken_package(?s:.*)no driver is here"
        ) as told:
            await launcher.launch(spec, LogChannel(), lambda: None)
        assert "`pilotflame build`" in told.value.remedy


async def test_a_container_that_somebody_removed_is_not_an_error(engine: Engine, state: Path) -> None:
    spec = WorkerSpec(function="f", revision="1-x", code=code(state), image=made_image())
    log: list[str] = []
    died = asyncio.Event()
    async with launching(engine.url, state, log) as launcher:
        await launcher.launch(spec, LogChannel(), died.set)
        podman("rm", "-f", "-t", "0", podman("ps", "-q", f"--filter=label=pilotflame.gateway={state}"))
        async with asyncio.timeout(LIMIT_S):
            await died.wait()
    assert log == []
