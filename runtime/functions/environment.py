"""The environment of a function: one virtual environment per set of requirements, on top of the current one.

Functions that need the same share it. What the current environment has (torch, pilotflame itself) is seen
through a .pth file and not installed again; what the function asks for in another version lies in front of
it.

Virtual environments hold absolute paths (scripts, pyvenv.cfg), so one is built where it will stay, under a
lock, and counts only once its marker file is there: a build that was interrupted has no marker and is begun
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import venv
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import RequirementsError
from .requirements import check_requirements, installed_versions, parse_requirements, requirements_digest

INSTALL_DEADLINE_S = 900.0

_MARKER = "pilotflame-complete"
# .pth files are read in the order of their names: the last one, so that the function's own paths come first.
_BASE_PTH = "zzzz_pilotflame_base.pth"
_KEPT_LINES = 20


@dataclass(frozen=True)
class Environment:
    """Where a function's Python is and what it sees."""

    python: Path
    digest: str
    installed: Mapping[str, str]


def ensure_environment(
    root: Path, requirements: str, progress: Callable[[str], None], *, deadline_s: float = INSTALL_DEADLINE_S
) -> Environment:
    """The environment for `requirements` under `root`, built if it is not there yet.

    No requirements: the current interpreter itself. Blocks for as long as pip needs, at most `deadline_s`.
    """
    digest = requirements_digest(requirements)
    if not parse_requirements(requirements):
        return Environment(Path(sys.executable), digest, installed_versions())
    folder = root.absolute() / _key(digest)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress) as lock_fd:
        if not _complete(folder):
            _build(folder, requirements, progress, lock_fd, deadline_s)
            _mark(folder, digest)
        elif not _met(folder, requirements):
            # Added to, not begun again: workers may be running in it.
            progress("the environment beneath has changed: installing what it no longer has")
            _install(folder, progress, lock_fd, deadline_s)
    return Environment(folder / "bin" / "python", digest, _installed(folder))


def _key(digest: str) -> str:
    """The folder's name: the same requirements on top of another interpreter are another environment."""
    base = f"{digest}\n{sys.prefix}\n{sys.version}\n{os.pathsep.join(_base_paths())}"
    return (
        f"py{sys.version_info.major}{sys.version_info.minor}-{hashlib.sha256(base.encode()).hexdigest()[:16]}"
    )


def _base_paths() -> list[str]:
    """The current environment's site-packages; in a virtual environment its own ones first."""
    paths = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.insert(0, site.getusersitepackages())
    return [path for path in paths if Path(path).is_dir()]


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def _complete(folder: Path) -> bool:
    # The interpreter is a link to one outside, which an upgrade may have taken away.
    return (folder / _MARKER).is_file() and (folder / "bin" / "python").exists()


def _installed(folder: Path) -> dict[str, str]:
    return installed_versions([str(_site_packages(folder)), *_base_paths()])


def _met(folder: Path, requirements: str) -> bool:
    try:
        check_requirements(requirements, _installed(folder))
    except RequirementsError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock file: two deploys that need the same environment build it once."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another deploy that builds the same environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(
    folder: Path, requirements: str, progress: Callable[[str], None], lock_fd: int, deadline_s: float
) -> None:
    if folder.exists():
        progress("removing an environment that was left unfinished")
        shutil.rmtree(folder)
    progress(f"creating {folder}")
    try:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        lines = [f"import site; site.addsitedir({path!r})\n" for path in _base_paths()]
        (_site_packages(folder) / _BASE_PTH).write_text("".join(lines), encoding="utf-8")
        (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RequirementsError(
            f"The environment {folder} cannot be created: {error}.",
            remedy="Look at that folder's disk and rights.",
        ) from error
    _install(folder, progress, lock_fd, deadline_s)


def _install(folder: Path, progress: Callable[[str], None], lock_fd: int, deadline_s: float) -> None:
    if importlib.util.find_spec("pip") is None:
        raise RequirementsError(
            f"{sys.executable} has no pip to install requirements.txt with.",
            remedy="Run `python -m ensurepip` in the gateway's environment.",
        )
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["-r", str(folder / "requirements.txt")]
    status, lines = _run(command, progress, lock_fd, deadline_s)
    if status is None:
        raise RequirementsError(
            f"pip did not finish requirements.txt within {deadline_s:g} s; its last lines: {_last(lines)}",
            remedy="Look at the package index and the network, then deploy again.",
        )
    if status != 0:
        raise RequirementsError(
            f"pip could not install requirements.txt (status {status}); its last lines: {_last(lines)}",
            remedy="Correct requirements.txt so that `pip install -r requirements.txt` succeeds.",
        )


def _run(
    command: list[str], progress: Callable[[str], None], lock_fd: int, deadline_s: float
) -> tuple[int | None, deque[str]]:
    """Run to the end, at most `deadline_s`; its status (None: out of time) and the last lines it wrote."""
    # PYTHONPATH would let pip count packages as installed that a worker does not see.
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    expired = threading.Event()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,  # pip starts pip: both are ended by their group
        pass_fds=(lock_fd,),  # should this process be killed, pip keeps the lock for as long as it writes
    ) as process:

        def expire() -> None:
            expired.set()
            _end(process)

        timer = threading.Timer(deadline_s, expire)
        timer.start()
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                progress(line.rstrip())
            status = process.wait()
        finally:
            timer.cancel()
            timer.join()
            _end(process)  # nothing is left if progress raised
    return (None if expired.is_set() else status), lines


def _end(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # a reaped process's group may be somebody else's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _last(lines: deque[str]) -> str:
    return "\n" + "\n".join(lines)


def _mark(folder: Path, digest: str) -> None:
    temporary = folder / f"{_MARKER}.new"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(f"{digest}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / _MARKER)
