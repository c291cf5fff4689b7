"""A container engine for tests: podman's service on a socket of its own, and an image with this pilotflame."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pilotflame
import pytest
from aiohttp import web

# Take the variable out of the environment, because the commands refuse variables PILOTFLAME_* that they do not know.
REQUIRED = os.environ.pop("PILOTFLAME_REQUIRE_CONTAINERS", "") == "1"
PODMAN = ("podman", "--runtime", "runc")
IMAGE = "localhost/pilotflame-test"
_SKIPPED = shutil.ignore_patterns(
    "test", "idlelib", "site-packages", "config-3*", "lib2to3", "ensurepip", "tkinter"
)
# Large packages and folders that only the gateway and the commands use. Images do not contain them.
_UNUSED = {"uv"}
_UNUSED_FOLDERS = {("torch", "test"), ("torch", "include")}
LIBRARY = "usr/local/lib/python3.11"
# Each image contains this package, which fails when it is imported.
BROKEN = "broken_package"


def require_podman() -> None:
    """Skip the test if there is no podman with runc; fail it if PILOTFLAME_REQUIRE_CONTAINERS is set."""
    missing = [
        name
        for name in ("podman", "runc")
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing and REQUIRED:
        pytest.fail(f"PILOTFLAME_REQUIRE_CONTAINERS is set, but {' and '.join(missing)} is not installed")
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")


_changes_images: ContextVar[bool] = ContextVar("changes_images", default=False)


@contextlib.contextmanager
def image_changes() -> Iterator[None]:
    """Keep other test processes from building and removing images during the block. Blocks may be nested.

    A build that looks for layers in its cache fails if another process removes an image at the same time.
    """
    if _changes_images.get():
        yield
        return
    with Path(tempfile.gettempdir(), f"pilotflame-images-{os.getuid()}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        token = _changes_images.set(True)
        try:
            yield
        finally:
            _changes_images.reset(token)


def podman(*arguments: str) -> str:
    """Run a podman command, and return its output."""
    with image_changes() if arguments[0] in ("build", "rmi") else contextlib.nullcontext():
        done = subprocess.run([*PODMAN, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Engine:
    """podman's service. It can be stopped and started again; containers continue to run without it."""

    def __init__(self, folder: Path, lent: str = "") -> None:
        """Mount `lent`, a distribution of this environment, into all containers.

        The mount takes no time, while building an image with torch takes half a minute.
        """
        self._environment = dict(os.environ)
        if lent:
            (folder / "containers.conf").write_text(f"[containers]\nvolumes = {json.dumps(_mounts(lent))}\n")
            self._environment["CONTAINERS_CONF"] = str(folder / "containers.conf")
        self._socket = folder / "engine.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*PODMAN, "system", "service", "--time", "0", self.url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            # podman starts conmon, which writes an empty file `oom` to its working folder when a container is
            # out of memory.
            cwd=self._socket.parent,
        )
        deadline_s = time.monotonic() + 30
        while not self._socket.exists():
            assert time.monotonic() < deadline_s, "podman's service did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def scripted_engine(
    folder: Path, create: Callable[[web.Request], Awaitable[web.StreamResponse]], version: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield the URL of an engine without containers: `create` answers requests for a container, `version` describes the engine."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/containers/create"):
            return await create(request)
        if request.method == "DELETE":
            return web.Response(status=204)
        return web.json_response([] if request.path.endswith("/containers/json") else version)

    folder.mkdir(parents=True, exist_ok=True)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "engine.sock")).start()
    try:
        yield f"unix://{folder / 'engine.sock'}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def running_engine(folder: Path, lent: str = "") -> Iterator[Engine]:
    engine = Engine(folder, lent)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def made_image(*, torch: bool = False) -> str:
    """Return an image with this Python and the installed pilotflame, and with torch if that is wanted.

    It is built once for each version of pilotflame, on top of an image that changes less often.
    """
    package = Path(pilotflame.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    parent = python_image(torch=torch)
    return _built(f"{parent}-{digest.hexdigest()[:16]}", parent, _fill_pilotflame)


def python_image(*, torch: bool = False) -> str:
    """Return an image with this Python and what pilotflame requires, but not pilotflame."""
    digest = hashlib.sha256(f"{sys.version}{Path(__file__).read_text()}".encode())
    for name in sorted(required_by("pilotflame")):
        digest.update(f"{name}=={importlib.metadata.version(name)}".encode())
    parent = _torch_image() if torch else "scratch"
    return _built(f"{IMAGE}:{digest.hexdigest()[:16]}{'-torch' if torch else ''}", parent, _fill_python)


def _torch_image() -> str:
    """Return an image with only torch and its requirements. Other images are built on it."""
    version = importlib.metadata.version("torch").replace("+", "-")
    return _built(f"{IMAGE}-torch:{version}", "scratch", _fill_torch)


def _built(tag: str, parent: str, fill: Callable[[Path], None]) -> str:
    """Return the image `tag`. If it is absent, build it from `parent` and the files that `fill` writes."""
    with missing_image(tag) as missing:
        if missing:
            with tempfile.TemporaryDirectory(prefix="pilotflame-image-") as folder:
                fill(Path(folder, "root"))
                Path(folder, "Containerfile").write_text(f"FROM {parent}\nCOPY root /\n")
                # The cache ignores the times of files, so a build could reuse a layer with other times.
                podman("build", "-q", "--no-cache", "-t", tag, folder)
    return tag


@contextlib.contextmanager
def missing_image(tag: str) -> Iterator[bool]:
    """Yield whether the block has to build the image `tag`. A lock admits one process; later processes find the built image."""
    with image_changes():
        yield subprocess.run([*PODMAN, "image", "exists", tag], check=False, timeout=60).returncode != 0


def _fill_pilotflame(root: Path) -> None:
    _install(root / LIBRARY, {"pilotflame"})
    (root / LIBRARY / "site-packages" / f"{BROKEN}.py").write_text(
        "raise RuntimeError('no driver is here')\n"
    )


def _fill_python(root: Path) -> None:
    """Write a root file system: the interpreter, its library, and what pilotflame requires."""
    interpreter, library = Path(sys.executable).resolve(), root / LIBRARY
    (root / "usr/local/bin").mkdir(parents=True)
    shutil.copy(interpreter, root / "usr/local/bin/python")
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_SKIPPED)
    _install(library, _required("pilotflame", set()) - {"pilotflame"})
    lent = Path(sysconfig.get_path("purelib"), "torch", "lib").glob("*.so*")
    copy_libraries(root, [interpreter, *root.rglob("*.so*"), *lent])
    for name in ("tmp", "proc", "dev", "sys", "etc", "run"):
        (root / name).mkdir(exist_ok=True)


def _fill_torch(root: Path) -> None:
    _install(root / LIBRARY, _required("torch", set()))
    copy_libraries(root, list(root.rglob("*.so*")))


def _install(library: Path, names: set[str]) -> None:
    """Copy distributions into the site-packages of `library`."""
    for required in names - _UNUSED:
        distribution = _installed(required)
        assert distribution is not None
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and source.is_file() and file.parts[:2] not in _UNUSED_FOLDERS:
                (library / "site-packages" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, library / "site-packages" / file)
                # Engines round times to seconds. If this time changed, each start would compile the module
                # again: a compiled module names the time of its source, and the container is read-only.
                whole_s = int(source.stat().st_mtime)
                os.utime(library / "site-packages" / file, (whole_s, whole_s))


def required_by(name: str) -> set[str]:
    """Return the names of all installed packages that a package requires, without its extras."""
    return _required(name, set()) - {name}


def _mounts(name: str) -> list[str]:
    """Return the mounts of a distribution and of its requirements, except packages that the images already have."""
    site = Path(sysconfig.get_path("purelib"))
    found = set[str]()
    for required in _required(name, set()) - _required("pilotflame", set()):
        distribution = _installed(required)
        assert distribution is not None
        found |= {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    places = [(site / top, f"/{LIBRARY}/site-packages/{top}") for top in sorted(found - {"__pycache__"})]
    return [f"{source}:{target}:ro" for source, target in places if source.exists()]


def copy_libraries(root: Path, programs: list[Path]) -> None:
    """Copy the shared libraries that these programs and libraries need to the same paths below `root`."""
    for needed in (path for path in shared_libraries(programs) if not path.startswith(sys.prefix)):
        (root / needed.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(needed, root / needed.lstrip("/"))


def _required(name: str, found: set[str]) -> set[str]:
    """Return the names of a distribution and of all that it requires."""
    if name not in found and (distribution := _installed(name)) is not None:
        found.add(name)
        for line in distribution.requires or []:
            if "extra ==" not in line and (match := re.match(r"[A-Za-z0-9._-]+", line)):
                _required(match[0], found)
    return found


def _installed(name: str) -> importlib.metadata.Distribution | None:
    """Return an installed distribution. The working directory, which may hold build files, is not searched."""
    return next(iter(importlib.metadata.distributions(name=name, path=[sysconfig.get_path("purelib")])), None)


def shared_libraries(files: list[Path]) -> set[str]:
    listed = subprocess.run(
        ["ldd", *map(str, files)], capture_output=True, text=True, check=False, timeout=60
    )
    return {path for path in re.findall(r"(/\S+\.so\S*) \(", listed.stdout) if not path.startswith("/tmp/")}
