"""The Containerfile of a function's image, as text. Nothing here reads a file or runs a command.

Layers that change rarely come first: base, system packages, requirements, pilotflame, weights, code. So a change of the
handler rebuilds only the last layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

CONTAINERFILE = "Containerfile"
REQUIREMENTS = "requirements.txt"
CONSTRAINTS = "constraints.txt"
# Folders of the build context.
CODE_FOLDER = "function"
WEIGHTS_FOLDER = "weights"
# The function's folder in the image.
FUNCTION_PATH = "/function"
# No user of a usual base image has this number. With `runAsNonRoot`, Kubernetes requires a numeric user.
USER = "65532:65532"
PORT = 8600
CUDA = "cuda"
CUDA_BASE = "docker.io/nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04"
# NVIDIA's image has no Python. The second package provides the command `python`, which the gateway starts.
CUDA_PACKAGES = ("python3", "python-is-python3")
DEFAULT_BASE = "docker.io/library/python:{}.{}-slim-bookworm".format(*sys.version_info[:2])
UV_IMAGE = "ghcr.io/astral-sh/uv"

_APT = """\
RUN apt-get update \\
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends {packages} \\
 && rm -rf /var/lib/apt/lists/*"""
# The program uv is mounted outside /usr/local/bin, because the package uv, which pilotflame requires, installs its own
# program there.
_INSTALL = """\
RUN --mount=type=bind,from=uv,source=/uv,target=/run/pilotflame/uv \\
    --mount=type=cache,target=/var/cache/uv \\
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml \\
    /run/pilotflame/uv pip install {arguments}"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The contents of the Containerfile of a function's image.

    All texts must have been checked: they become part of lines of the Containerfile, without quotes.
    """

    function: str
    uv_version: str
    wheel: str
    """The file name of pilotflame's wheel in the build context."""
    extras: tuple[str, ...] = ()
    """The extras of pilotflame that the function needs, such as s3."""
    base: str | None = None
    packages: tuple[str, ...] = ()
    requirements: bool = False
    hashes: bool = False
    """Whether the requirements have hashes. If they do, each package needs a hash."""
    weights: bool = False

    @property
    def base_image(self) -> str:
        """The image that the function's image starts from."""
        return CUDA_BASE if self.base == CUDA else self.base or DEFAULT_BASE

    def containerfile(self) -> str:
        """Return the text of the Containerfile. It is built in a folder that `write_context` has filled."""
        return "\n".join([*self._head(), *self._packages(), *self._pilotflame(), *self._image(), ""])

    def _head(self) -> Iterator[str]:
        yield f"# The image of the function {self.function}, made by `pilotflame build`."
        yield f"ARG UV_IMAGE={UV_IMAGE}:{self.uv_version}"
        yield "FROM ${UV_IMAGE} AS uv"
        yield ""
        yield f"FROM {self.base_image}"
        yield "# The secret `uv`, if it is given, is a uv.toml with the package indexes and their credentials."
        yield "ENV UV_SYSTEM_PYTHON=1 UV_BREAK_SYSTEM_PACKAGES=1 UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy"
        yield "ENV UV_CACHE_DIR=/var/cache/uv"

    def _packages(self) -> Iterator[str]:
        system = (*(CUDA_PACKAGES if self.base == CUDA else ()), *self.packages)
        if system:
            yield _APT.format(packages=" ".join(dict.fromkeys(system)))
        if self.requirements:
            options = "--require-hashes " if self.hashes else ""
            yield f"COPY {REQUIREMENTS} /opt/pilotflame/"
            yield _INSTALL.format(arguments=f"{options}-r /opt/pilotflame/{REQUIREMENTS}")

    def _pilotflame(self) -> Iterator[str]:
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        constraints = f"-c /opt/pilotflame/{CONSTRAINTS} " if self.requirements else ""
        copied = f"{CONSTRAINTS} {self.wheel}" if self.requirements else self.wheel
        yield f"COPY {copied} /opt/pilotflame/"
        wheel = f"'pilotflame{extras} @ file:///opt/pilotflame/{self.wheel}'"
        yield _INSTALL.format(arguments=f"{constraints}{wheel}")

    def _image(self) -> Iterator[str]:
        labels = {
            "org.opencontainers.image.title": self.function,
            "org.opencontainers.image.base.name": self.base_image,
            "pilotflame.function": self.function,
        }
        command = ["pilotflame", "serve", FUNCTION_PATH, "--host", "0.0.0.0"]  # noqa: S104  a container
        yield ""
        yield "LABEL " + " \\\n      ".join(f'{key}="{value}"' for key, value in labels.items())
        yield "ENV HOME=/tmp USER=pilotflame"
        yield f"USER {USER}"
        yield f"EXPOSE {PORT}"
        yield "ENTRYPOINT []"
        yield f"CMD {json.dumps(command)}"
        if self.weights:
            yield f"COPY --chmod=0755 {WEIGHTS_FOLDER} {FUNCTION_PATH}"
        yield f"COPY {CODE_FOLDER} {FUNCTION_PATH}"
