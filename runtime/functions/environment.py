"""The Python environment of a function: one virtual environment per set of requirements, made by uv.

Functions with the same requirements share an environment. It extends the current one: a .pth file makes the current
environment's packages (torch, pilotflame itself) importable, so they are not installed again. Packages that are needed
in another version precede them on the path.

Virtual environments hold absolute paths (scripts, pyvenv.cfg), so one is built where it will stay, under a lock. Its
marker file is written last: an environment without a marker is unfinished and is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import RequirementsError
from ...snapshot.publish import publish
from .requirements import check_requirements, installed_versions, requirements_digest
from .uv_command import UvCommand, placeholders, remove_placeholders

INSTALL_DEADLINE_S = 900.0

_MARKER = "pilotflame-complete"
# .pth files are read in the order of their names. The last one adds its paths behind the environment's own.
_BASE_PTH = "zzzz_pilotflame_base.pth"


def ensure_environment(
    root: Path, requirements: str, progress: Callable[[str], None], *, deadline_s: float = INSTALL_DEADLINE_S
) -> Path:
    """Return the Python of the environment for `requirements` below `root`, and build it if it is not there yet.

    `progress` gets each line that uv writes. Blocks for as long as uv needs, at most `deadline_s` per command.
    """
    digest = requirements_digest(requirements)
    folder = root.absolute() / _key(digest)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress) as lock_fd:
        uv = UvCommand(root, progress, lock_fd, deadline_s)
        if not _complete(folder):
            _build(folder, requirements, uv)
            with publish(folder / _MARKER) as marker:
                marker.write(f"{digest}\n".encode())
        elif not _met(folder, requirements):
            # Not built anew: workers may be running in it.
            progress("the gateway's environment has changed: installing what it no longer has")
            _install(folder, uv)
    return folder / "bin" / "python"


def _key(digest: str) -> str:
    """Return the folder's name: the same requirements on another interpreter are another environment."""
    base = f"{digest}\n{sys.prefix}\n{sys.version}\n{os.pathsep.join(_base_paths())}"
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    return f"py{version}-{hashlib.sha256(base.encode()).hexdigest()[:16]}"


def _base_paths() -> list[str]:
    """Return the site-packages of the current environment."""
    paths = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.insert(0, site.getusersitepackages())
    return [path for path in paths if Path(path).is_dir()]


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def _complete(folder: Path) -> bool:
    # The interpreter is a link to one outside, which an upgrade may have removed.
    return (folder / _MARKER).is_file() and (folder / "bin" / "python").exists()


def _met(folder: Path, requirements: str) -> bool:
    remove_placeholders(_site_packages(folder))
    try:
        check_requirements(requirements, installed_versions([str(_site_packages(folder)), *_base_paths()]))
    except RequirementsError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock file, so that two deploys with the same requirements build their environment once."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another deploy that builds the same environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(folder: Path, requirements: str, uv: UvCommand) -> None:
    if folder.exists():
        uv.progress("removing an unfinished environment")
        shutil.rmtree(folder)
    uv.progress(f"creating {folder}")
    uv.run("venv", "--quiet", "--no-project", "--python", sys.executable, str(folder))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _base_paths()]
    (_site_packages(folder) / _BASE_PTH).write_text("".join(lines), encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    _install(folder, uv)


def _install(folder: Path, uv: UvCommand) -> None:
    with placeholders(_site_packages(folder), _base_paths()):
        uv.install(folder / "bin" / "python", folder / "requirements.txt")
