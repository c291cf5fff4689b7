"""Prefetching images: the engine pulls each image once from a registry over HTTP, and an error says why a pull failed."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from containers import IMAGE, podman, require_podman, running_engine
from live import short_folder
from pilotflame.errors import LauncherError
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.node.launching.container_launcher import ContainerLauncher

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """Serves the image in a folder, as `podman save --format oci-dir` wrote it, under the name `tiny:1`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifests = folder, 0
        (described,) = json.loads((folder / "index.json").read_text())["manifests"]
        self.digest = described["digest"]

    def body(self, path: str) -> tuple[bytes, str] | None:
        if path == "/v2/":
            return b"{}", "application/json"
        if path in {"/v2/tiny/manifests/1", f"/v2/tiny/manifests/{self.digest}"}:
            self.manifests += 1
            return self._blob(self.digest), MANIFEST
        if path.startswith("/v2/tiny/blobs/"):
            return self._blob(path.rpartition("/")[2]), "application/octet-stream"
        return None

    def _blob(self, digest: str) -> bytes:
        return (self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()


@contextmanager
def serving(registry: Registry) -> Iterator[str]:
    """Serve the registry. Yield its host and port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = registry.body(self.path)
            body, kind = found or (b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}', "application/json")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    require_podman()
    build, saved = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("saved") / "tiny"
    (build / "file").write_text(f"only here: {build}")
    (build / "Containerfile").write_text("FROM scratch\nCOPY file /\n")
    tag = f"{IMAGE}-tiny:{build.parent.name}"
    podman("build", "-q", "-t", tag, str(build))
    podman("save", "-q", "--format", "oci-dir", "-o", str(saved), tag)
    podman("rmi", tag)
    return Registry(saved)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pulling(registry: Registry) -> AsyncIterator[tuple[ContainerLauncher, str]]:
    """Yield a launcher, and the host of the registry. The launcher's engine may use this registry without TLS."""
    listener: Any = None
    with short_folder() as folder, serving(registry) as host, pytest.MonkeyPatch.context() as patched:
        trusted = folder / "registries.conf"
        trusted.write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
        patched.setenv("CONTAINERS_REGISTRIES_CONF", str(trusted))
        with running_engine(folder) as engine:
            async with BackgroundTasks() as tasks:
                launcher = ContainerLauncher(engine.url, listener, tasks, str(folder), print)
                try:
                    yield launcher, host
                finally:
                    await launcher.close()


def spec(image: str) -> WorkerSpec:
    return WorkerSpec(function="f", revision="r1-x", code=Path("/nowhere"), image=image)


@pytest.mark.parametrize("named", ["tiny:1", "tiny@{digest}"])
async def test_a_missing_image_is_pulled_once(
    pulling: tuple[ContainerLauncher, str], registry: Registry, named: str
) -> None:
    launcher, host = pulling
    image = f"{host}/{named.format(digest=registry.digest)}"
    try:
        assert await launcher.provide(spec(image)) is True
        asked = registry.manifests
        assert asked > 0
        assert await launcher.provide(spec(image)) is False
        assert registry.manifests == asked
        podman("image", "exists", image)
    finally:
        podman("rmi", image)


async def test_what_cannot_be_pulled_says_why(pulling: tuple[ContainerLauncher, str]) -> None:
    launcher, host = pulling
    for image in (f"{host}/other:1", "127.0.0.1:1/nobody/listens:1"):
        with pytest.raises(LauncherError, match=f"Image {image} cannot be pulled") as told:
            await launcher.provide(spec(image))
        assert "registry" in told.value.remedy


async def test_a_launcher_without_its_engine_says_so() -> None:
    listener: Any = None
    async with BackgroundTasks() as tasks:
        launcher = ContainerLauncher("unix:///nowhere/engine.sock", listener, tasks, "here", print)
        with pytest.raises(LauncherError, match="cannot be reached"):
            await launcher.provide(spec("any:1"))
