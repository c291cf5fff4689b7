"""What builds without a network need: a base image with a package `tinything`, uv's image, and a registry."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
import uv
from containers import podman, require_podman, required_by
from local_images import LIMITS, base_image
from wheels import write_installed_wheel, write_wheel

# Remove all packages but pip, because a stock image of Python has only pip in /usr/local.
STRIP = """
import pathlib, shutil, sysconfig
for entry in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
    if not entry.name.startswith("pip"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the name of a base image, which is removed after the tests.

    Like python:*-slim, the image has Python in /usr/local without packages. The wheels of pilotflame's requirements are in /wheels.
    """
    require_podman()
    folder = tmp_path_factory.mktemp("base")
    (folder / "wheels").mkdir()
    write_wheel(folder / "wheels", "tinything", "1.0", "VERSION = '1.0'\n")
    for name in sorted(required_by("pilotflame")):
        # Replace uv's program, which is large, by an empty script. No test calls it.
        scripts = {"uv": "#!/bin/sh\n", "uvx": "#!/bin/sh\n"} if name == "uv" else {}
        write_installed_wheel(folder / "wheels", name, scripts)
    name = f"localhost/pilotflame-test-build-base:{folder.parent.name}"
    run = json.dumps(["/usr/local/bin/python", "-c", STRIP])
    (folder / "Containerfile").write_text(f"FROM {base_image()}\nCOPY wheels /wheels\nRUN {run}\n")
    podman("build", "-q", *LIMITS, "-t", name, str(folder))
    yield name
    podman("rmi", "--force", name)


@pytest.fixture(scope="session")
def uv_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the name of an image with uv, like Astral's image. It is removed after the tests."""
    folder = tmp_path_factory.mktemp("uv")
    shutil.copy(uv.find_uv_bin(), folder / "uv")
    (folder / "Containerfile").write_text("FROM scratch\nCOPY uv /uv\n")
    name = f"localhost/pilotflame-test-build-uv:{folder.parent.name}"
    podman("build", "-q", "-t", name, str(folder))
    yield name
    podman("rmi", "--force", name)


class Registry(ThreadingHTTPServer):
    """A container registry on a free port, with only what a push needs. It refuses repositories below /refused."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _RegistryHandler)
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.address = f"127.0.0.1:{self.server_port}"


class _RegistryHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        self._answer(200 if self.path.rpartition("/")[2] in self.server.blobs else 404)

    def do_POST(self) -> None:
        self._body()
        refused = self.path.startswith("/v2/refused")
        self._answer(403 if refused else 202, Location=f"/v2/uploads/{uuid.uuid4()}")

    def do_PATCH(self) -> None:
        self.server.blobs[self.path] = self._body()
        self._answer(202, Location=self.path)

    def do_PUT(self) -> None:
        body = self._body()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if "/manifests/" in self.path:
            self.server.manifests[self.path] = body
        else:
            place, _, named = self.path.partition("?digest=")
            digest = unquote(named)
            self.server.blobs[digest] = self.server.blobs.pop(place) + body
        self._answer(201, Location=self.path, Docker_Content_Digest=digest)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()
