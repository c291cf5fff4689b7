"""Launches functions in containers, through the Docker Engine API of docker or podman.

Each revision has one container. Its first process is a base, and the zygote and the workers are forked in it.
They connect to the gateway's link socket, which is mounted into the container, so it needs no network.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import LauncherError, PilotflameError
from ...snapshot.caching.mounted import KeptFolders
from ...snapshot.caching.node import keep_folders
from ...snapshot.format.manifest import Manifest
from ..link.connection import Link
from ..link.worker_spec import REQUEST_VARIABLE, STACKS_SIGNAL, Confinement, WorkerSpec
from ..telemetry.log_stream import LogStream
from ..telemetry.logs import Log, LogBook
from .launcher import Child
from .listener import Listener
from .process_launcher import SINGLE_THREADED
from .zygote_process import ZygoteProcess, ZygoteSource

if TYPE_CHECKING:
    import aiodocker
    from aiodocker.containers import DockerContainer

START_TIMEOUT_S = 300.0
REMOVE_TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 3600.0
EXIT_TIMEOUT_S = 5.0
# How long a gateway that closes waits for the engine to end the start of a container.
LAST_START_TIMEOUT_S = 5.0
ENGINE_TIMEOUT_S = 60.0
GATEWAY_LABEL = "pilotflame.gateway"
COMMAND = ("python", "-m", "pilotflame.runtime.worker.zygote", "base")
SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
OPEN_FILES = 4096
# What a container has if the settings of its function do not say.
PIDS, TMP_MB = 1024, 1024
# How many processes and threads can exist on this machine.
PID_MAX = Path("/proc/sys/kernel/pid_max")
# The only folder of a container that can be written to.
TMP = "/tmp"  # noqa: S108
# aiodocker uses this status if it cannot connect.
UNREACHABLE = 900
_MIB = 1 << 20
_LAST_LINES = 20
MAX_OUTPUT_CHARS = 2000
SHUTTING_DOWN = "The gateway is shutting down."


def find_engine(environ: dict[str, str] | os._Environ[str] = os.environ) -> str | None:
    """Return the URL of the engine's socket: DOCKER_HOST, or the socket of docker or podman that exists."""
    if url := environ.get("DOCKER_HOST"):
        return url
    runtime = environ.get("XDG_RUNTIME_DIR")
    own = (f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock") if runtime else ()
    return next((f"unix://{path}" for path in (*own, *SOCKETS) if Path(path).is_socket()), None)


class ContainerChild(Child):
    """A process in a container. Its parent sends its signals, and reports its end.

    If the parent has ended, the process is known to have ended when its container was removed.
    """

    def __init__(
        self, link: Link, pid: int, name: str, output: LogStream | None, send_signal: Callable[[int], None],
        container: Container,
    ) -> None:  # fmt: skip
        super().__init__(link, pid, name, output)
        self._send_signal, self._container = send_signal, container
        container.hold(self)

    def kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def dump_stacks(self) -> None:
        self._send_signal(STACKS_SIGNAL)

    def report_exit(self, code: int | None, *, out_of_memory: bool = False, certain: bool = True) -> None:
        super().report_exit(code, out_of_memory=out_of_memory, certain=certain)
        if code is not None:
            self._container.release(self)
            self.ended()


class Container:
    """A container of the engine, and the processes in it that have connected."""

    def __init__(
        self, name: str, spec: WorkerSpec, engine_side: DockerContainer,
        starting: asyncio.Task[LauncherError | None], weights: KeptFolders | None,
    ) -> None:  # fmt: skip
        self.name, self.spec, self.engine_side = name, spec, engine_side
        self.starting = starting
        """Ends when the engine has created and started it, or has failed to."""
        self.weights = weights
        """The folders of the node's cache that are mounted into it. None if it needs none."""
        self.first: ContainerChild | None = None
        """Its first process. None if it has not connected."""
        self._children: set[ContainerChild] = set()

    def hold(self, child: ContainerChild) -> None:
        self.first = self.first or child
        self._children.add(child)

    def release(self, child: ContainerChild) -> None:
        self._children.discard(child)

    def note_removed(self) -> None:
        """Set `gone` of all its processes."""
        for child in self._children:
            child.report_exit(None)
            child.ended()
        self._children.clear()


class ContainerZygote(ZygoteProcess):
    """The process of a base or a zygote in a container."""

    def __init__(
        self, child: Child, listener: Listener, on_death: Callable[[], None], container: Container
    ) -> None:
        super().__init__(child, listener, on_death)
        self._container = container

    def _make_child(self, link: Link, pid: int, name: str, token: str, output: LogStream | None) -> Child:
        send_signal = functools.partial(self.send_signal, token)
        return ContainerChild(link, pid, name, output, send_signal, self._container)


class ContainerBase(ContainerZygote):
    """The first process of a container. The container is removed when it is closed, and when its zygote dies."""

    def __init__(
        self, child: Child, listener: Listener, remove: Callable[[], None], container: Container
    ) -> None:
        super().__init__(child, listener, remove, container)
        self._remove = remove
        self._orphaned = False

    def close(self) -> None:
        super().close()
        self._remove()

    async def launch(
        self, spec: WorkerSpec, logs: Log, on_death: Callable[[], None],
        confinement: Confinement | None = None,
    ) -> ZygoteSource:  # fmt: skip
        if (weights := self._container.weights) is not None:
            spec = spec.model_copy(update={"mounted": tuple(weights.paths)})
        return await super().launch(spec, logs, on_death, confinement)

    def _make_zygote(self, child: Child, on_death: Callable[[], None]) -> ZygoteProcess:
        def on_zygote_death() -> None:
            # The workers that it leaves have no parent that tells their ends, and a relaunch needs their memory.
            self._orphaned = True
            if child.gone.is_set():
                self.close()
            on_death()

        return ContainerZygote(child, self._listener, on_zygote_death, self._container)

    def _child_ended(self, pid: int, code: int, out_of_memory: bool, certain: bool = True) -> None:
        super()._child_ended(pid, code, out_of_memory, certain)
        # Not before: this tells why the zygote died.
        if self._orphaned:
            self.close()

    def _make_source(
        self, zygote: ZygoteProcess, spec: WorkerSpec, facts: dict[str, Any], reason: str,
        _confinement: Confinement | None,
    ) -> ZygoteSource:  # fmt: skip
        return ContainerSource(zygote, self, spec, facts, reason)


class ContainerSource(ZygoteSource):
    """Forks a revision's workers from its zygote. Closing it removes the container."""

    def close(self) -> None:
        super().close()
        self._base.close()

    async def wait_closed(self, timeout_s: float) -> None:
        await self._base.child.wait_gone(timeout_s)


class ContainerLauncher:
    """Runs one container for each revision that has an image."""

    def __init__(
        self,
        url: str | None,
        listener: Listener,
        tasks: asyncio.TaskGroup,
        gateway: str,
        log: Callable[[str], None],
    ) -> None:
        """`url` is the socket of the engine. `gateway` identifies the containers of this gateway."""
        self._log = log
        self._url, self._listener, self._tasks, self._gateway = url, listener, tasks, gateway
        self._engine: aiodocker.Docker | None = None
        self._connecting = asyncio.Lock()
        self._user = ""
        self._containers: set[Container] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def launch(self, spec: WorkerSpec, logs: Log, on_death: Callable[[], None]) -> ZygoteSource:
        """Launch the zygote of `spec` in a container of its own. Raise HandlerError or LauncherError."""
        base = await self._start_base(spec, logs)
        try:
            return await base.launch(spec, logs, on_death)
        except BaseException:
            base.close()
            raise

    async def prepare(self, _spec: WorkerSpec) -> None:
        """Connect to the engine, and remove what a killed gateway has left there. Raise LauncherError."""
        await self._connect()

    async def provide(self, spec: WorkerSpec) -> bool:
        """Pull the image of `spec` if the engine does not have it. Return True if it was pulled."""
        from aiodocker.exceptions import DockerError  # noqa: PLC0415

        engine = await self._connect()
        try:
            async with _engine_errors(self._url), asyncio.timeout(PULL_TIMEOUT_S):
                try:
                    await engine.images.inspect(spec.image)
                except DockerError as error:
                    if error.status != HTTPStatus.NOT_FOUND:
                        raise
                else:
                    return False
                await engine.images.pull(spec.image)
        except TimeoutError:
            message = f"Image {spec.image} was not pulled within {PULL_TIMEOUT_S:.0f} s."
            raise LauncherError(message, remedy="See the engine's log, and the registry.") from None
        except LauncherError as error:
            message = f"Image {spec.image} cannot be pulled. {error.message}"
            remedy = "Check its name, and that the engine can reach and log in to its registry."
            raise LauncherError(message, remedy=remedy) from error
        return True

    async def forget(self, spec: WorkerSpec) -> None:
        """Remove what is left of the containers of a revision that has ended."""
        await self._remove_all([one for one in self._containers if one.spec is spec])

    def shared_pids(self) -> list[int]:
        return []

    def end_unused(self) -> None:
        """Do nothing: a container ends with its zygote."""

    async def close(self) -> None:
        """Remove all containers of this gateway."""
        self._closed = True
        await self._remove_all(self._containers)
        if self._removing:
            await asyncio.wait(self._removing, timeout=REMOVE_TIMEOUT_S)
        # An engine that is being connected to is closed too.
        async with self._connecting:
            if self._engine is not None:
                await self._engine.close()

    # -- the engine

    async def _connect(self) -> aiodocker.Docker:
        """Return the client of the engine. The first call removes containers that a killed gateway left."""
        async with self._connecting:
            if self._engine is None and not self._closed:
                self._engine = await self._open()
            # It may have been closed meanwhile.
            if self._engine is None or self._closed:
                raise LauncherError(SHUTTING_DOWN)
            return self._engine

    async def _open(self) -> aiodocker.Docker:
        try:
            import aiodocker  # noqa: PLC0415  only functions with an image need it
        except ImportError:
            message = "Functions with an image need the package aiodocker, which is not installed."
            raise LauncherError(message, remedy="pip install aiodocker") from None
        if self._url is None:
            raise LauncherError(
                "No container engine was found.",
                remedy="Install docker or podman, start its service, or set DOCKER_HOST to the URL of its socket.",
            )
        try:
            engine = aiodocker.Docker(url=self._url)
        except (ValueError, RuntimeError, aiodocker.exceptions.DockerError) as error:
            message = f"The container engine's URL {self._url!r} (PILOTFLAME_ENGINE, DOCKER_HOST) is not valid: {error}"
            remedy = "Set it to the URL of the engine's socket, as unix:///var/run/docker.sock."
            raise LauncherError(message, remedy=remedy) from error
        try:
            async with _engine_errors(self._url):
                info = await engine.system.info()
                for container in await engine.containers.list(
                    all=True, filters={"label": [f"{GATEWAY_LABEL}={self._gateway}"]}
                ):
                    await container.delete(force=True)
        except BaseException:
            await engine.close()
            raise
        # A rootless engine maps the user who runs it to root, and files of that user are mounted.
        rootless = any("rootless" in option for option in info.get("SecurityOptions") or ())
        self._user = "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"
        return engine

    # -- containers

    async def _start_base(self, spec: WorkerSpec, logs: Log) -> ContainerBase:
        engine = await self._connect()
        weights = await self._keep_weights(spec)
        name = f"pilotflame-{spec.function}-{spec.revision.partition('-')[0]}-{secrets.token_hex(4)}"
        dialled: asyncio.Future[ContainerChild] = asyncio.get_running_loop().create_future()
        token = self._listener.expect(
            "zygote", f"container {name}", LogBook(),
            lambda link, pid, output: dialled.set_result(
                ContainerChild(link, pid, name, output, lambda _number: self._end(container), container)
            ),
        )  # fmt: skip
        configuration = self._configuration(spec, token, weights.paths if weights is not None else ())
        starting = self._tasks.create_task(self._start(engine, name, configuration))
        container = Container(name, spec, engine.containers.container(name), starting, weights)
        self._containers.add(container)
        try:
            # If the caller is cancelled meanwhile, the engine goes on, and `_remove` waits for its end.
            child = await self._wait_dialled(container, await asyncio.shield(starting), dialled)
            base = await self._wait_built(container, child)
        except BaseException:
            self._end(container)
            raise
        finally:
            self._listener.forget(token)
        logs.write("gateway", f"container {name} runs {spec.image}")
        return base

    async def _keep_weights(self, spec: WorkerSpec) -> KeptFolders | None:
        """Return the folders of the node's cache that a container needs, if any, to be closed after its end."""
        if spec.cache is None or spec.manifest is None:
            return None
        cache, manifest = spec.cache, spec.manifest
        loop = asyncio.get_running_loop()
        keeping = loop.run_in_executor(None, lambda: keep_folders(cache, Manifest.read(manifest).digest))
        try:
            # Unlike an await, this leaves it running if the caller is cancelled.
            await asyncio.wait([keeping])
            return keeping.result()
        except asyncio.CancelledError:
            self._tasks.create_task(_let_go(keeping))
            raise
        except (PilotflameError, OSError) as error:
            message = f"The node's cache of weights in {cache} cannot be mounted: {error}."
            raise LauncherError(
                message, remedy="See its owner, its disk and the mode of the folder."
            ) from error

    async def _start(
        self, engine: aiodocker.Docker, name: str, configuration: dict[str, Any]
    ) -> LauncherError | None:
        """Let the engine create and start a container. Return its error, which is then not a failure of the task."""
        try:
            async with _engine_errors(self._url), asyncio.timeout(ENGINE_TIMEOUT_S):
                created = await engine.containers.create(configuration, name=name)
                if self._closed:
                    return LauncherError(SHUTTING_DOWN)
                await created.start()
        except LauncherError as error:
            return error
        except TimeoutError:
            return LauncherError(
                f"The container engine did not start {name} within {ENGINE_TIMEOUT_S:.0f} s."
            )
        return None

    def _configuration(self, spec: WorkerSpec, token: str, weights: Iterable[Path]) -> dict[str, Any]:
        """Return the body of the engine's request to create the container."""
        limits = spec.resources
        request = {"address": str(self._listener.path), "token": token, "preload": spec.preload}
        environment = {
            **SINGLE_THREADED,
            "PYTHONUNBUFFERED": "",
            "HOME": TMP,
            REQUEST_VARIABLE: json.dumps(request),
        }
        host: dict[str, Any] = {
            "Mounts": [_mount(self._listener.path, writable=True), *_read_only(spec), *map(_mount, weights)],
            "NetworkMode": limits.network or "none", "ReadonlyRootfs": True, "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"], "PidsLimit": limits.pids or PIDS,
            "Tmpfs": {TMP: f"rw,nosuid,nodev,size={(limits.tmp_mb or TMP_MB) * _MIB}"}, "Ulimits": list(_limits()),
        }  # fmt: skip
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
            "Image": spec.image, "Entrypoint": [], "Cmd": list(COMMAND), "User": self._user, "WorkingDir": "/",
            "Env": [f"{key}={value}" for key, value in environment.items()], "Labels": labels, "HostConfig": host,
        }  # fmt: skip

    async def _wait_dialled(
        self, container: Container, error: LauncherError | None, dialled: asyncio.Future[ContainerChild]
    ) -> ContainerChild:
        """Return the container's first process once it has connected.

        Raise `error`, the engine's, or LauncherError if it ends before.
        """
        if self._closed:
            raise LauncherError(SHUTTING_DOWN)
        if error is not None:
            raise error
        name = container.name
        ended = self._tasks.create_task(self._last_words(container.engine_side))
        try:
            waited: set[asyncio.Future[Any]] = {ended, dialled}
            await asyncio.wait(waited, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if dialled.done():
                return dialled.result()
            if not ended.done():
                raise LauncherError(f"Container {name} did not connect within {START_TIMEOUT_S:.0f} s.")
            remedy = "The image must have a `python` with pilotflame in it; see docs/containers.md."
            raise LauncherError(f"Container {name} {ended.result()}", remedy=remedy)
        finally:
            ended.cancel()

    async def _wait_built(self, container: Container, child: ContainerChild) -> ContainerBase:
        """Return the base once it has imported its packages. Raise LauncherError, if it ends before with why."""
        built = False

        def remove() -> None:
            # The caller removes one that was not built, after its last output has been read.
            if built:
                self._end(container)

        base = ContainerBase(child, self._listener, remove, container)
        try:
            await base.wait_built(START_TIMEOUT_S)
        except LauncherError as error:
            if base.alive:
                raise
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    words = await self._last_words(container.engine_side)
            except TimeoutError:
                raise error from None
            remedy = (
                "Correct the image. If the code is 137, it may need more memory: raise resources.memory_mb."
            )
            raise LauncherError(f"Container {container.name} {words}", remedy=remedy) from None
        built = True
        return base

    async def _last_words(self, container: DockerContainer) -> str:
        """Wait until a container has ended. Return how, for a message: the exit code and the last output."""
        try:
            async with _engine_errors(self._url):
                code = (await container.wait())["StatusCode"]
                if self._closed:
                    return f"ended with code {code}: {SHUTTING_DOWN}"
                lines = await container.log(stdout=True, stderr=True, tail=_LAST_LINES)
        except LauncherError as error:
            return f"was lost before it was ready: {error}"
        return f"ended with code {code} before it was ready: {''.join(lines)[-MAX_OUTPUT_CHARS:].strip()}"

    def _end(self, container: Container) -> None:
        """Remove a container in the background: it has ended, or is to be killed."""
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
            await asyncio.wait([container.starting], timeout=LAST_START_TIMEOUT_S if self._closed else None)
            async with _engine_errors(self._url), asyncio.timeout(REMOVE_TIMEOUT_S):
                if first is not None and first.link.closed:
                    # Its first process ends by itself. An engine may fail to kill what is just ending.
                    with contextlib.suppress(TimeoutError), _if_there():
                        await there.wait(timeout=EXIT_TIMEOUT_S)
                with _if_there():
                    await there.delete(force=True)
        except (LauncherError, TimeoutError) as error:
            # The next gateway with this state folder removes what is left.
            self._log(f"container {container.name} could not be removed: {error}")
        finally:
            container.note_removed()
            if container.weights is not None:
                await asyncio.to_thread(container.weights.close)


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """Suppress the engine's error for a container that it does not have."""
    import aiodocker  # noqa: PLC0415

    try:
        yield
    except aiodocker.exceptions.DockerError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


@contextlib.asynccontextmanager
async def _engine_errors(url: str | None) -> AsyncIterator[None]:
    """Raise LauncherError for errors of the engine and of the connection to it."""
    import aiodocker  # noqa: PLC0415
    import aiohttp  # noqa: PLC0415

    try:
        yield
    except aiodocker.exceptions.DockerError as error:
        if error.status == UNREACHABLE:
            message, remedy = f"The container engine at {url} cannot be reached.", "Start its service."
        elif error.status == HTTPStatus.NOT_FOUND:
            message = f"The container engine does not have it: {error.message}."
            remedy = "Build or pull the image on this node."
        else:
            message, remedy = f"The container engine refused: {error.message}.", "See the engine's log."
        raise LauncherError(message, remedy=remedy) from error
    except aiohttp.ClientError as error:
        message = f"The container engine at {url} ended the connection: {error}."
        raise LauncherError(message, remedy="See the engine's log.") from error


async def _let_go(keeping: asyncio.Future[KeptFolders]) -> None:
    """Close the folders of a launch that was cancelled."""
    with contextlib.suppress(PilotflameError, OSError):
        await asyncio.to_thread((await keeping).close)


def _read_only(spec: WorkerSpec) -> Iterator[dict[str, Any]]:
    """Yield the mounts of what the function reads: its code, and the weights and their manifest."""
    for path in {spec.code, spec.snapshot, spec.manifest}:
        if path is not None:
            yield _mount(path)


def _mount(path: Path, *, writable: bool = False) -> dict[str, Any]:
    """Return the mount of a file or folder at its own path. As one text, a colon in the path would split it."""
    return {"Type": "bind", "Source": str(path), "Target": str(path), "ReadOnly": not writable}


def _limits() -> Iterator[dict[str, Any]]:
    """Yield the limits of each process. An engine may be unable to set higher ones than the gateway has.

    The kernel counts all processes of a user on the machine against `nproc`. So it is as many as can exist on
    the machine, and `PidsLimit` limits those of the container.
    """
    for name, number, wanted in (
        ("nofile", resource.RLIMIT_NOFILE, OPEN_FILES),
        ("nproc", resource.RLIMIT_NPROC, int(PID_MAX.read_text())),
    ):
        _, most = resource.getrlimit(number)
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        yield {"Name": name, "Soft": value, "Hard": value}
