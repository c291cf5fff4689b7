"""Talks to the container engine, docker or podman, through the Docker Engine API."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from ....errors import LauncherError
from .nvidia_gpus import NvidiaDriver

if TYPE_CHECKING:
    import aiodocker
    from aiodocker.containers import DockerContainer

REMOVE_TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 3600.0
# If a container ends by itself, wait this long for its end. After that, let the engine kill it.
EXIT_TIMEOUT_S = 5.0
ENGINE_TIMEOUT_S = 60.0
GATEWAY_LABEL = "pilotflame.gateway"
SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
# aiodocker uses this status if it cannot connect.
UNREACHABLE = 900
# The first version of podman that gives a container the devices which are named in the request to create it.
PODMAN_WITH_GPUS = Version("5.4.0")
SHUTTING_DOWN = "The gateway is shutting down."
_LAST_LINES = 20
MAX_OUTPUT_CHARS = 2000


def find_engine(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the URL of the engine's socket: DOCKER_HOST, or the socket of docker or podman that exists."""
    if url := environ.get("DOCKER_HOST"):
        return url
    runtime = environ.get("XDG_RUNTIME_DIR")
    own = (f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock") if runtime else ()
    return next((f"unix://{path}" for path in (*own, *SOCKETS) if Path(path).is_socket()), None)


def _podman_of(version: dict[str, Any]) -> Version | None:
    """Return podman's version from the response of /version; None if the engine is not podman."""
    for component in version.get("Components") or ():
        if component.get("Name") == "Podman Engine":
            try:
                return Version(str(component.get("Version")))
            except InvalidVersion:
                # A build between two releases counts as new enough.
                return PODMAN_WITH_GPUS
    return None


# The remedy for an image in which no worker can start.
NOT_BUILT = (
    "Make the image with `pilotflame build`, or install pilotflame into its `python` (docs/containers.md)."
)


class ContainerEngine:
    """A connection to the engine, which the first call of `connect` makes. A method that talks to the engine raises
    LauncherError if this fails; `start` and `last_words` return the failure.
    """

    def __init__(self, url: str | None, gateway: str) -> None:
        """`url` is the engine's socket. `gateway` labels the containers of this gateway."""
        self._url, self._gateway = url, gateway
        self._client: aiodocker.Docker | None = None
        self._connecting = asyncio.Lock()
        self._user = ""
        # The version of podman; None if the engine is docker.
        self._podman: Version | None = None
        self.closing = False
        """True after `refuse_starts`."""

    def refuse_starts(self) -> None:
        """Start no container any more, because the gateway shuts down."""
        self.closing = True

    async def connect(self) -> aiodocker.Docker:
        """Return the client. The first call removes containers that a killed gateway left."""
        async with self._connecting:
            if self._client is None and not self.closing:
                self._client = await self._open()
            # The gateway may have begun to shut down meanwhile.
            if self._client is None or self.closing:
                raise LauncherError(SHUTTING_DOWN)
            return self._client

    def container(self, name: str) -> DockerContainer:
        """Return the engine's side of a container. Raise LauncherError before `connect` has succeeded."""
        if self._client is None:
            raise LauncherError("The container engine is not connected.")
        return self._client.containers.container(name)

    def gpu_requests(self, ids: Sequence[str], cdi_kind: str) -> list[dict[str, Any]]:
        """Return the request for these GPUs of the node, in the form that the engine understands. Call it after
        `connect`.
        """
        if self._podman is None and cdi_kind == NvidiaDriver.cdi_kind:
            return [{"Driver": "", "DeviceIDs": list(ids), "Capabilities": [["gpu"]]}]
        if self._podman is not None and self._podman < PODMAN_WITH_GPUS:
            # This podman would start the container without GPUs, and report no error.
            raise LauncherError(
                f"podman {self._podman} gives containers no GPUs through its API.",
                remedy=f"Use podman {PODMAN_WITH_GPUS} or newer, docker, or a function without image.name.",
            )
        return [{"Driver": "cdi", "DeviceIDs": [f"{cdi_kind}={one}" for one in ids]}]

    async def provide(self, image: str) -> bool:
        """Pull an image if the engine does not have it. Return True if it was pulled."""
        from aiodocker.exceptions import DockerError  # noqa: PLC0415

        client = await self.connect()
        try:
            async with self._errors(image), asyncio.timeout(PULL_TIMEOUT_S):
                try:
                    await client.images.inspect(image)
                except DockerError as error:
                    if error.status != HTTPStatus.NOT_FOUND:
                        raise
                else:
                    return False
                await client.images.pull(image)
        except TimeoutError:
            message = f"Image {image} was not pulled within {PULL_TIMEOUT_S:.0f} s."
            raise LauncherError(message, remedy="See the engine's log, and the registry.") from None
        except LauncherError as error:
            message = f"Image {image} cannot be pulled. {error.message}"
            remedy = "Check its name, and that the engine can reach and log in to its registry."
            raise LauncherError(message, remedy=remedy) from error
        return True

    async def start(self, name: str, configuration: dict[str, Any]) -> LauncherError | None:
        """Create and start a container. Return an error instead of raising it, so that the task which runs this method
        does not fail.

        `configuration` is the body of the request to the engine. This method adds the user of the container's
        processes.
        """
        try:
            client = await self.connect()
            async with self._errors(str(configuration["Image"])), asyncio.timeout(ENGINE_TIMEOUT_S):
                created = await client.containers.create({**configuration, "User": self._user}, name=name)
                if self.closing:
                    return LauncherError(SHUTTING_DOWN)
                await created.start()
        except LauncherError as error:
            return error
        except TimeoutError:
            return LauncherError(
                f"The container engine did not start {name} within {ENGINE_TIMEOUT_S:.0f} s."
            )
        return None

    async def last_words(self, container: DockerContainer) -> str:
        """Wait until a container has ended. Return its exit code and its last output, as a part of a message."""
        try:
            async with self._errors():
                code = (await container.wait())["StatusCode"]
                if self.closing:
                    return f"ended with code {code}: {SHUTTING_DOWN}"
                lines = await container.log(stdout=True, stderr=True, tail=_LAST_LINES)
        except LauncherError as error:
            return f"was lost before it was ready: {error}"
        return f"ended with code {code} before it was ready: {''.join(lines)[-MAX_OUTPUT_CHARS:].strip()}"

    async def remove(self, container: DockerContainer, *, ending: bool) -> None:
        """Remove a container and its processes. If the container is `ending` by itself, first wait at most
        EXIT_TIMEOUT_S for its end.

        Raise LauncherError or TimeoutError.
        """
        async with self._errors(), asyncio.timeout(REMOVE_TIMEOUT_S):
            if ending:
                # Wait first, because an engine may fail to kill a container that is just ending.
                with contextlib.suppress(TimeoutError), _if_there():
                    await container.wait(timeout=EXIT_TIMEOUT_S)
            with _if_there():
                await container.delete(force=True, v=True)

    async def close(self) -> None:
        # Wait for the lock, so that a connection that is just being made is closed too.
        async with self._connecting:
            if self._client is not None:
                await self._client.close()

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
            client = aiodocker.Docker(url=self._url)
        except (ValueError, RuntimeError, aiodocker.exceptions.DockerError) as error:
            message = f"The container engine's URL {self._url!r} (PILOTFLAME_ENGINE, DOCKER_HOST) is not valid: {error}"
            remedy = "Set it to the URL of the engine's socket, as unix:///var/run/docker.sock."
            raise LauncherError(message, remedy=remedy) from error
        try:
            async with self._errors():
                info = await client.system.info()
                self._podman = _podman_of(await client.version())
                for container in await client.containers.list(
                    all=True, filters={"label": [f"{GATEWAY_LABEL}={self._gateway}"]}
                ):
                    await container.delete(force=True, v=True)
        except BaseException:
            await client.close()
            raise
        # Run containers as the user who owns the mounted files. In a container of a rootless engine, this user is root.
        rootless = any("rootless" in option for option in info.get("SecurityOptions") or ())
        self._user = "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"
        return client

    @contextlib.asynccontextmanager
    async def _errors(self, image: str = "") -> AsyncIterator[None]:
        """Raise LauncherError for errors of the engine and of the connection to it. `image` is the image that the
        request needs.
        """
        import aiodocker  # noqa: PLC0415
        import aiohttp  # noqa: PLC0415

        try:
            yield
        except aiodocker.exceptions.DockerError as error:
            if error.status == UNREACHABLE:
                message, remedy = (
                    f"The container engine at {self._url} cannot be reached.",
                    "Start its service.",
                )
            elif "executable file" in error.message:
                message, remedy = f"The image has no `python`: {error.message}.", NOT_BUILT
            elif error.status == HTTPStatus.NOT_FOUND and image:
                message = f"The container engine does not have the image: {error.message}."
                tool = "docker" if self._podman is None else "podman"
                remedy = f"Run `{tool} pull {image}` on this node, or build it there with `pilotflame build`, and deploy again."
            else:
                message, remedy = f"The container engine refused: {error.message}.", "See the engine's log."
            raise LauncherError(message, remedy=remedy) from error
        except aiohttp.ClientError as error:
            message = f"The container engine at {self._url} ended the connection: {error}."
            raise LauncherError(message, remedy="See the engine's log.") from error


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """Suppress the engine's error for a container that it does not have."""
    import aiodocker  # noqa: PLC0415

    try:
        yield
    except aiodocker.exceptions.DockerError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
