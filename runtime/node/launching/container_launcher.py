"""Launches functions in containers, through the Docker Engine API of docker or podman.

Each revision has one container. The first process in the container is a base, from which the zygote is forked, and from
the zygote the workers. All these processes connect to the gateway's link socket. It is mounted into the container, so
the container needs no network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import LauncherError, PilotflameError
from ....snapshot.caching.mounted import KeptFolders
from ....snapshot.caching.node import DEFAULT_BUDGETS, Budgets, keep_folders
from ....snapshot.format.manifest import Manifest
from ...calls.link.worker_spec import REQUEST_VARIABLE, Weights, WorkerSpec
from ...ground.settings.resources import PIDS
from ...ground.telemetry.logs import Log, LogChannel
from ..scaling.placement import Gpu, candidates, need_of
from .container import Container, ContainerBase, ContainerChild
from .container_engine import (
    EXIT_TIMEOUT_S,
    GATEWAY_LABEL,
    NOT_BUILT,
    REMOVE_TIMEOUT_S,
    SHUTTING_DOWN,
    ContainerEngine,
)
from .gpus import ASK_WITHOUT_USE
from .launcher import NO_SECRETS
from .listener import Listener
from .nvidia_gpus import NvidiaDriver
from .process_launcher import SINGLE_THREADED
from .zygote_process import ZygoteSource

# How long a closing gateway waits for the engine to finish the start of a container.
LAST_START_TIMEOUT_S = 5.0
# Limit the size of the folders that podman mounts writable although the root is read-only. Otherwise, their files could
# fill the memory of the machine.
SMALL_TMPFS = dict.fromkeys(("/run", "/var/tmp"), "rw,nosuid,nodev,noexec,size=1m")  # noqa: S108
COMMAND = ("python", "-m", "pilotflame.zygote", "base")
OPEN_FILES = 4096
# The size of a container's folder for files, in MiB, if the function does not set `resources.tmp_mb`.
TMP_MB = 1024
# The file with the largest number of processes and threads that this machine can have.
PID_MAX = Path("/proc/sys/kernel/pid_max")
# The folder for files in a container. Except for it and SMALL_TMPFS, a container has no folder that can be written to.
TMP = "/tmp"  # noqa: S108
_MIB = 1 << 20


class WeightFolders:
    """Keeps the folders of the node's cache that containers mount. They stay even while the cache evicts their files."""

    def __init__(self, budgets: Budgets, tasks: asyncio.TaskGroup) -> None:
        self._budgets, self._tasks = budgets, tasks

    async def keep(self, spec: WorkerSpec) -> dict[str, KeptFolders]:
        """Return the folders that a container needs, by snapshot. The caller closes them after the container's end.

        Raise LauncherError.
        """
        if not spec.remote:
            return {}
        keeping = asyncio.get_running_loop().run_in_executor(None, self._keep_all, spec)
        try:
            # Unlike `await keeping`, this does not cancel `keeping` if the caller is cancelled.
            await asyncio.wait([keeping])
            return keeping.result()
        except asyncio.CancelledError:
            self._tasks.create_task(_let_go(keeping))
            raise

    def _keep_all(self, spec: WorkerSpec) -> dict[str, KeptFolders]:
        """Return the folders that `keep` returns. This blocks. Raise LauncherError."""
        with contextlib.ExitStack() as undo:
            found = {}
            for weights in spec.remote:
                found[weights.name] = self._keep(weights)
                undo.callback(found[weights.name].close)
            undo.pop_all()
        return found

    def _keep(self, weights: Weights) -> KeptFolders:
        cache = weights.cache or Path()
        try:
            return keep_folders(cache, Manifest.read(weights.manifest).digest, self._budgets)
        except (PilotflameError, OSError) as error:
            message = f"The node's cache of weights in {cache} cannot be mounted: {error}."
            remedy = "See its owner, its disk and the mode of the folder."
            raise LauncherError(message, remedy=remedy).about(weights.subject) from error


async def _let_go(keeping: asyncio.Future[dict[str, KeptFolders]]) -> None:
    """Close the folders of a launch that was cancelled."""
    with contextlib.suppress(LauncherError):
        for kept in (await keeping).values():
            await asyncio.to_thread(kept.close)


class ContainerLauncher:
    """Runs one container for each revision that has an image."""

    def __init__(
        self,
        url: str | None,
        listener: Listener,
        tasks: asyncio.TaskGroup,
        gateway: str,
        log: Callable[[str], None],
        budgets: Budgets = DEFAULT_BUDGETS,
        gpus: Sequence[Gpu] = (),
        cdi_kind: str = NvidiaDriver.cdi_kind,
    ) -> None:
        """`url` is the socket of the engine. `gateway` identifies the containers of this gateway.

        Workers are placed on `gpus`. `cdi_kind` is their kind in the Container Device Interface (CDI).
        """
        self._log, self._gpus, self._cdi_kind = log, gpus, cdi_kind
        self._listener, self._tasks, self._gateway = listener, tasks, gateway
        self._weights = WeightFolders(budgets, tasks)
        self._engine = ContainerEngine(url, gateway)
        self._containers: set[Container] = set()
        self._removing: set[asyncio.Task[None]] = set()

    async def launch(
        self,
        spec: WorkerSpec,
        logs: Log,
        on_death: Callable[[], None],
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> ZygoteSource:
        """Launch the zygote of `spec` in a container of its own. Raise HandlerError or LauncherError."""
        base = await self._start_base(spec, logs)
        try:
            return await base.launch(spec, logs, on_death, secrets)
        except BaseException:
            base.close()
            raise

    async def prepare(self, _spec: WorkerSpec) -> None:
        """Connect to the engine, and remove the containers that a killed gateway has left. Raise LauncherError."""
        await self._engine.connect()

    async def provide(self, spec: WorkerSpec) -> bool:
        """Pull the image of `spec` if the engine does not have it. Return True if it was pulled."""
        return await self._engine.provide(spec.image)

    async def forget(self, spec: WorkerSpec) -> None:
        """Remove the containers that are left of a revision that has ended."""
        await self._remove_all([one for one in self._containers if one.spec is spec])

    def base_pids(self) -> list[int]:
        first = [container.first for container in self._containers]
        return [child.pid for child in first if child is not None and not child.gone.is_set()]

    def end_unused(self) -> None:
        """Do nothing: a container ends with its zygote."""

    async def close(self) -> None:
        """Remove all containers of this gateway."""
        self._engine.refuse_starts()
        await self._remove_all(self._containers)
        if self._removing:
            await asyncio.wait(self._removing, timeout=REMOVE_TIMEOUT_S)
        await self._engine.close()

    # -- containers

    async def _start_base(self, spec: WorkerSpec, logs: Log) -> ContainerBase:
        await self._engine.connect()
        devices = self._devices(spec)
        weights = await self._weights.keep(spec)
        name = f"pilotflame-{spec.function}-{spec.revision.partition('-')[0]}-{secrets.token_hex(4)}"
        dialled: asyncio.Future[ContainerChild] = asyncio.get_running_loop().create_future()
        token = self._listener.expect(
            "zygote", f"container {name}", LogChannel(),
            lambda link, pid, output: dialled.set_result(
                ContainerChild(link, pid, name, output, lambda _number: self._end(container), container)
            ),
        )  # fmt: skip
        # Two names may belong to one snapshot, and an engine refuses to mount the same folder twice.
        folders = dict.fromkeys(path for kept in weights.values() for path in kept.paths)
        configuration = self._configuration(spec, token, folders, devices)
        starting = self._tasks.create_task(self._engine.start(name, configuration))
        container = Container(name, spec, self._engine.container(name), starting, weights, logs)
        self._containers.add(container)
        try:
            # Shield the start: if the caller is cancelled, the engine goes on, and `_remove` waits until the engine is
            # done.
            child = await self._wait_dialled(container, await asyncio.shield(starting), dialled)
            base = await self._wait_built(container, child)
        except BaseException:
            self._end(container)
            raise
        finally:
            self._listener.forget(token)
        logs.write("gateway", f"container {name} runs {spec.image}")
        return base

    def _devices(self, spec: WorkerSpec) -> list[dict[str, Any]]:
        """Return the request for the GPUs on which workers of the container may be placed. The frame ACTIVATE names the
        GPUs of each worker.
        """
        if (need := need_of(spec.resources)) is None:
            return []
        if not (ids := [gpu.id for gpu in candidates(self._gpus, need)]):
            message = f"This node has no GPU for {spec.label} (resources.gpus)."
            raise LauncherError(message, remedy="See `pilotflame doctor` and the gateway's setting `gpus`.")
        return self._engine.gpu_requests(ids, self._cdi_kind)

    def _configuration(
        self, spec: WorkerSpec, token: str, weights: Iterable[Path], devices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the body of the engine's request to create the container."""
        limits = spec.resources
        request = {"address": str(self._listener.path), "token": token, "preload": spec.preload}
        environment = {
            **SINGLE_THREADED,
            **ASK_WITHOUT_USE,
            "PYTHONUNBUFFERED": "",
            "HOME": TMP,
            REQUEST_VARIABLE: json.dumps(request),
        }
        host: dict[str, Any] = {
            "Mounts": [_mount(self._listener.path, writable=True), *_read_only(spec), *map(_mount, weights)],
            "NetworkMode": limits.network or "none", "ReadonlyRootfs": True, "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"], "PidsLimit": PIDS,
            "Tmpfs": {TMP: f"rw,nosuid,nodev,size={(limits.tmp_mb or TMP_MB) * _MIB}", **SMALL_TMPFS}, "Ulimits": list(_limits()),
        }  # fmt: skip
        if devices:
            host["DeviceRequests"] = devices
        else:
            # Ask for no GPUs. Otherwise, if NVIDIA's runtime is the engine's default, a variable of the image could ask
            # for all GPUs.
            environment["NVIDIA_VISIBLE_DEVICES"] = "void"
        if limits.memory_mb is not None:
            host |= {"Memory": limits.memory_mb * _MIB, "MemorySwap": limits.memory_mb * _MIB}
        if limits.cpus is not None:
            host["NanoCpus"] = int(limits.cpus * 1e9)
        labels = {
            GATEWAY_LABEL: self._gateway,
            "pilotflame.function": spec.function,
            "pilotflame.revision": spec.revision,
        }
        return {
            "Image": spec.image, "Entrypoint": [], "Cmd": list(COMMAND), "WorkingDir": "/",
            "Env": [f"{key}={value}" for key, value in environment.items()], "Labels": labels, "HostConfig": host,
        }  # fmt: skip

    async def _wait_dialled(
        self, container: Container, error: LauncherError | None, dialled: asyncio.Future[ContainerChild]
    ) -> ContainerChild:
        """Return the container's first process once it has connected.

        Raise `error`, which the engine has reported, unless it is None. Raise LauncherError if the container ends
        first, or does not connect in time.
        """
        if self._engine.closing:
            raise LauncherError(SHUTTING_DOWN)
        if error is not None:
            raise error
        name = container.name
        ended = self._tasks.create_task(self._engine.last_words(container.engine_side))
        try:
            waited: set[asyncio.Future[Any]] = {ended, dialled}
            await asyncio.wait(
                waited, timeout=container.spec.build_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if dialled.done():
                return dialled.result()
            if not ended.done():
                raise LauncherError(
                    f"Container {name} did not connect within {container.spec.build_timeout_s:.0f} s (build_timeout_s)."
                )
            raise LauncherError(f"Container {name} {ended.result()}", remedy=NOT_BUILT)
        finally:
            ended.cancel()

    async def _wait_built(self, container: Container, child: ContainerChild) -> ContainerBase:
        """Return the base once it has imported its packages. Raise LauncherError. If the base ends first, the error
        says why.
        """
        built = False

        def remove() -> None:
            # If the base was not built, the caller of `_wait_built` removes the container after the last output has
            # been read.
            if built:
                self._end(container)

        base = ContainerBase(child, self._listener, remove, container)
        try:
            await base.wait_built(container.spec.build_timeout_s)
        except LauncherError as error:
            if base.alive:
                raise
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    words = await self._engine.last_words(container.engine_side)
            except TimeoutError:
                raise error from None
            remedy = f"{NOT_BUILT} If the code is 137, it may need more memory: raise resources.memory_mb."
            raise LauncherError(f"Container {container.name} {words}", remedy=remedy) from None
        built = True
        return base

    def _end(self, container: Container) -> None:
        """Remove a container in the background, because it has ended or must be killed."""
        if container in self._containers:
            task = self._tasks.create_task(self._remove(container))
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

    async def _remove_all(self, containers: Iterable[Container]) -> None:
        await asyncio.gather(*(self._remove(container) for container in list(containers)))

    async def _remove(self, container: Container) -> None:
        if container not in self._containers:
            return
        self._containers.discard(container)
        first, there = container.first, container.engine_side
        try:
            await asyncio.wait(
                [container.starting], timeout=LAST_START_TIMEOUT_S if self._engine.closing else None
            )
            await self._engine.remove(there, ending=first is not None and first.link.closed)
        except (LauncherError, TimeoutError) as error:
            # The next gateway with this state folder removes what is left.
            self._log(f"container {container.name} could not be removed: {error}")
        finally:
            container.note_removed()
            for kept in container.weights.values():
                await asyncio.to_thread(kept.close)


def _read_only(spec: WorkerSpec) -> Iterator[dict[str, Any]]:
    """Yield the mounts of the files that the function reads: its code, its weights and their manifests."""
    for path in {spec.code, *(path for one in spec.weights for path in one.folders)}:
        yield _mount(path)


def _mount(path: Path, *, writable: bool = False) -> dict[str, Any]:
    """Return the mount of a file or folder at its own path. In the engine's short form for mounts, a colon in the path
    would split the path.
    """
    return {"Type": "bind", "Source": str(path), "Target": str(path), "ReadOnly": not writable}


def _limits() -> Iterator[dict[str, Any]]:
    """Yield the limits of each process. No limit exceeds the gateway's own limit, because an engine may be unable to
    set a higher limit.

    The kernel counts all processes of a user on the machine against `nproc`. So `nproc` is the largest number of
    processes that the machine can have, and `PidsLimit` limits the processes of the container.
    """
    for name, number, wanted in (
        ("nofile", resource.RLIMIT_NOFILE, OPEN_FILES),
        ("nproc", resource.RLIMIT_NPROC, int(PID_MAX.read_text())),
    ):
        _, most = resource.getrlimit(number)
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        yield {"Name": name, "Soft": value, "Hard": value}
