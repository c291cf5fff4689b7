"""Requests to the engine for GPUs. Test machines have no GPU, so the tests inspect the requests instead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from containers import made_image, podman, require_podman, running_engine, scripted_engine
from live import short_folder
from packaging.version import Version
from pilotflame.errors import LauncherError
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.node.launching.container_engine import PODMAN_WITH_GPUS
from pilotflame.runtime.node.launching.container_launcher import ContainerLauncher
from pilotflame.runtime.node.launching.listener import Listener
from pilotflame.runtime.node.scaling.placement import Gpu

DOCKER = {"Components": [{"Name": "Engine", "Version": "28.3.1"}]}


def podman_version(version: str) -> dict[str, Any]:
    return {
        "Components": [{"Name": "Podman Engine", "Version": version}, {"Name": "Conmon", "Version": "2.1"}]
    }


@asynccontextmanager
async def recording_engine(
    folder: Path, version: dict[str, Any], message: str = "not here", status: int = 500
) -> AsyncIterator[tuple[str, list[Any]]]:
    """Yield the URL of an engine that refuses to create containers with this message, and the list of the requests."""
    asked: list[Any] = []

    async def create(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return web.json_response({"message": message}, status=status)

    async with scripted_engine(folder, create, {"ApiVersion": "1.43", **version}) as url:
        yield url, asked


async def refusal(
    url: str, state: Path, resources: Resources, image: str = "any", gpus: tuple[Gpu, ...] = ()
) -> LauncherError:
    """Launch a function whose start must fail. Return the error."""
    (state / "code").mkdir(parents=True)
    (state / "code" / "handler.py").write_text("def handler(event):\n    return event\n")
    spec = WorkerSpec(function="f", revision="1-x", code=state / "code", image=image, resources=resources)
    listener = Listener(state / "run" / "link.sock")
    listener.open()
    try:
        async with BackgroundTasks() as tasks:
            launcher = ContainerLauncher(url, listener, tasks, str(state), print, gpus=gpus)
            try:
                with pytest.raises(LauncherError) as caught:
                    await launcher.launch(spec, LogChannel(), lambda: None)
            finally:
                await launcher.close()
    finally:
        listener.close()
    return caught.value


GPUS = (Gpu("GPU-a", 16384), Gpu("GPU-b", 16384), Gpu("MIG-c", 8192))


def cdi(*names: str) -> list[dict[str, Any]]:
    return [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={name}" for name in names]}]


@pytest.mark.parametrize(
    ("version", "command"),
    [(DOCKER, "docker pull other/echo:1"), (podman_version("5.4.0"), "podman pull other/echo:1")],
)
async def test_an_image_that_is_not_on_the_node_can_be_pulled(
    state: Path, version: dict[str, Any], command: str
):
    async with recording_engine(state, version, "No such image: other/echo:1", 404) as (url, _):
        error = await refusal(url, state, Resources(), "other/echo:1")
    assert "No such image" in error.message
    assert f"`{command}`" in error.remedy
    assert "deploy again" in error.remedy


async def test_an_image_without_python_names_the_command_that_makes_images(state: Path):
    said = 'exec: "python": executable file not found in $PATH'
    async with recording_engine(state, DOCKER, said, 404) as (url, _):
        error = await refusal(url, state, Resources())
    assert "has no `python`" in error.message
    assert "`pilotflame build`" in error.remedy


@pytest.mark.parametrize(
    ("version", "resources", "wanted"),
    [
        (
            DOCKER,
            Resources(gpus=1),
            [{"Driver": "", "DeviceIDs": ["GPU-a", "GPU-b", "MIG-c"], "Capabilities": [["gpu"]]}],
        ),
        (podman_version("5.4.0"), Resources(gpus=1), cdi("GPU-a", "GPU-b", "MIG-c")),
        (podman_version("5.6-dev-x"), Resources(gpus=2), cdi("GPU-a", "GPU-b")),
        (podman_version("5.4.0"), Resources(gpus=1, gpu_memory_mb=10000), cdi("GPU-a", "GPU-b")),
    ],
)
async def test_gpus_on_which_its_workers_may_be_are_asked_for(
    state: Path, version: dict[str, Any], resources: Resources, wanted: list[Any]
):
    async with recording_engine(state, version) as (url, asked):
        await refusal(url, state, resources, gpus=GPUS)
    assert [one["HostConfig"]["DeviceRequests"] for one in asked] == [wanted]


async def test_a_node_without_a_gpu_starts_no_container_that_needs_one(state: Path):
    async with recording_engine(state, DOCKER) as (url, asked):
        error = await refusal(url, state, Resources(gpus=1))
    assert asked == []
    assert "no GPU" in error.message


@pytest.mark.parametrize("gpus", [None, 0])
async def test_without_need_none_are_asked_for(state: Path, gpus: int | None):
    async with recording_engine(state, DOCKER) as (url, asked):
        await refusal(url, state, Resources(gpus=gpus))
    assert ["DeviceRequests" in one["HostConfig"] for one in asked] == [False]


async def test_its_base_asks_for_gpus_without_using_one(state: Path):
    async with recording_engine(state, DOCKER) as (url, asked):
        await refusal(url, state, Resources())
    assert ["PYTORCH_NVML_BASED_CUDA_CHECK=1" in one["Env"] for one in asked] == [True]


async def test_a_podman_that_would_leave_them_out_is_refused(state: Path):
    require_podman()
    version = podman("version", "--format={{.Server.Version}}").strip()
    if Version(version) >= PODMAN_WITH_GPUS:
        pytest.skip(f"podman {version} gives containers GPUs")
    with short_folder() as folder, running_engine(folder) as engine:
        error = await refusal(engine.url, state, Resources(gpus=1), made_image(), GPUS)
    assert error.message == f"podman {version} gives containers no GPUs through its API."
    assert "docker" in error.remedy
