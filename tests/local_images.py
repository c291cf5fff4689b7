"""Images for tests of infra/, made from what is installed on this machine: no registry can be reached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from containers import IMAGE, copy_libraries, missing_image, podman, python_image

# Options for podman on machines where its limits cannot be raised.
LIMITS = ("--network", "host", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
ROOT = Path(__file__).parents[1]
SITE = "usr/local/lib/python3.11/site-packages"
# /tmp is open to all users, as in all images of distributions.
PREPARE = "import os; os.chmod('/tmp', 0o1777)"


def base_image() -> str:
    """Return an image to build on: Python, pip, a shell, and all that pilotflame requires, but not pilotflame."""
    build = f'FROM {python_image()}\nCOPY root /\nRUN ["/usr/local/bin/python", "-c", "{PREPARE}"]\n'

    def write(root: Path) -> None:
        for name in ("pip", "setuptools"):
            _add_distribution(root, name)
        # pilotflame requires the distribution `uv`, but no test of these images runs it. Copy only its
        # metadata, because its program is large.
        _add_distribution(root, "uv", only=".dist-info/")
        _add_program(root, Path("/bin/sh").resolve(), "bin/sh")

    return _image("base", build, write)


def program_image(program: Path) -> str:
    """Return an image that holds one program of this machine."""
    digest = hashlib.sha256(program.read_bytes()).hexdigest()

    def write(root: Path) -> None:
        _add_program(root, program, f"usr/local/bin/{program.name}")
        (root / "etc").mkdir()
        # Without this file, programs in Go ask only the name server.
        (root / "etc/nsswitch.conf").write_text("hosts: files dns\n")

    return _image(program.name, f"# {digest}\nFROM scratch\nCOPY root /\n", write)


def gateway_image(tag: str) -> None:
    """Build infra/gateway/Containerfile without a package index, on the base image."""
    arguments = {"BASE": base_image(), "PIP_NO_INDEX": "1", "EXTRAS": ""}
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    file = str(ROOT / "infra/gateway/Containerfile")
    podman("build", "-q", "--layers=false", *LIMITS, *given, "-f", file, "-t", tag, str(ROOT))


def _image(name: str, build: str, write: Callable[[Path], None]) -> str:
    """Return the tag of an image with the files that `write` writes. The image is made once for each
    Containerfile `build`.
    """
    build += "ENV PATH=/usr/local/bin:/usr/bin:/bin\n"
    key = f"{build}{Path(__file__).read_text()}"
    tag = f"{IMAGE}-{name}:{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with missing_image(tag) as missing:
        if missing:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "root/tmp").mkdir(parents=True)
                write(Path(folder, "root"))
                Path(folder, "Containerfile").write_text(build)
                podman("build", "-q", "--layers=false", *LIMITS, "-t", tag, folder)
    return tag


def _add_distribution(root: Path, name: str, only: str = "") -> None:
    for file in importlib.metadata.files(name) or ():
        if ".." not in file.parts and only in str(file):
            (root / SITE / file).parent.mkdir(parents=True, exist_ok=True)
            # Copy the times, too: Python compares them to decide whether a compiled module is valid.
            shutil.copy2(file.locate(), root / SITE / file)


def _add_program(root: Path, program: Path, path: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / path)
    copy_libraries(root, [program])
