"""A container engine for tests: podman's service on a socket of its own, and an image with this pilotflame."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pilotflame
import pytest

# Taken out of the environment, because the commands refuse variables PILOTFLAME_* that they do not know.
REQUIRED = os.environ.pop("PILOTFLAME_REQUIRE_CONTAINERS", "") == "1"
PODMAN = ("podman", "--runtime", "runc")
IMAGE = "localhost/pilotflame-test"
_SKIPPED = shutil.ignore_patterns(
    "__pycache__", "test", "idlelib", "site-packages", "config-3*", "lib2to3", "ensurepip", "tkinter"
)
# These are large, and only the gateway and the commands use them.
_UNUSED = {"uv"}


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


def podman(*arguments: str) -> str:
    """Run a podman command, and return its output."""
    done = subprocess.run([*PODMAN, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Engine:
    """podman's service. It can be stopped and started again; containers go on without it."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "engine.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*PODMAN, "system", "service", "--time", "0", self.url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def made_image() -> str:
    """Return an image with this Python and the installed pilotflame. It is built once for each version of both."""
    package = Path(pilotflame.__file__).parent
    digest = hashlib.sha256(sys.version.encode())
    for path in [Path(__file__), *sorted(package.rglob("*.py"))]:
        digest.update(path.read_bytes())
    tag = f"{IMAGE}:{digest.hexdigest()[:16]}"
    exists = subprocess.run([*PODMAN, "image", "exists", tag], check=False, timeout=60).returncode == 0
    if not exists:
        build = Path(os.environ.get("TMPDIR", "/tmp")) / f"pilotflame-image-{os.getpid()}"
        try:
            _fill(build / "root")
            (build / "Containerfile").write_text("FROM scratch\nCOPY root /\n")
            podman("build", "-q", "-t", tag, str(build))
        finally:
            shutil.rmtree(build, ignore_errors=True)
    return tag


def _fill(root: Path) -> None:
    """Write a root file system: the interpreter, its library, pilotflame and what it requires."""
    interpreter, library = Path(sys.executable).resolve(), root / "usr/local/lib/python3.11"
    (root / "usr/local/bin").mkdir(parents=True)
    shutil.copy(interpreter, root / "usr/local/bin/python")
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_SKIPPED)
    for name in _required("pilotflame", set()) - _UNUSED:
        distribution = _installed(name)
        assert distribution is not None
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (library / "site-packages" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, library / "site-packages" / file)
    copy_libraries(root, [interpreter, *root.rglob("*.so*")])
    for name in ("tmp", "proc", "dev", "sys", "etc", "run"):
        (root / name).mkdir(exist_ok=True)


def copy_libraries(root: Path, programs: list[Path]) -> None:
    """Copy the shared libraries that these programs and libraries need to the same paths below `root`."""
    for needed in _shared_libraries(programs):
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


def _shared_libraries(files: list[Path]) -> set[str]:
    listed = subprocess.run(
        ["ldd", *map(str, files)], capture_output=True, text=True, check=False, timeout=60
    )
    return {path for path in re.findall(r"(/\S+\.so\S*) \(", listed.stdout) if not path.startswith("/tmp/")}
