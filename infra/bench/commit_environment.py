"""A temporary copy of the present virtual environment with the wheel of another commit.

The other packages keep their present versions, even if the commit requires different ones. The files are hard
links, so the copy takes seconds and little space. pip replaces the links of the wheel and writes into no shared file.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# Hard links need the file system of the environment, and /tmp may be another one.
_BUILD = _ROOT / "build" / "bench"
_INSTALL = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]


@contextmanager
def environment_of(commit: str) -> Iterator[Path]:
    """Build the environment of a commit, yield its Python interpreter, and remove the environment at the end."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="commit-", dir=_BUILD) as folder:
        source, environment = Path(folder) / "source", Path(folder) / "environment"
        _extract(commit, source)
        subprocess.run(["cp", "-al", "--", sys.prefix, str(environment)], check=True)
        python = environment / "bin" / "python"
        # The copied `pip` script would start the interpreter of the present environment.
        subprocess.run([python, "-m", "pip", *_INSTALL, "--force-reinstall", str(source)], check=True)
        yield python


def hash_of(commit: str) -> str:
    """Return the full hash of a commit that is named by a branch, a tag or an expression such as `HEAD~3`."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(f"{commit!r} names no commit of this repository")
    return found.stdout.strip()


def _extract(commit: str, folder: Path) -> None:
    command = ["git", "-C", str(_ROOT), "archive", "--format=tar", commit]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
