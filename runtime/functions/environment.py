"""The Python environment of a function: one virtual environment per set of requirements, made by uv.

Functions with the same requirements share an environment. It extends the current one: a .pth file makes the current
environment's packages (torch, pilotflame itself) importable, so they are not installed again. Packages that are needed
in another version precede them on the path. uv regards a package as installed only if it is in the environment's own
site-packages; placeholders show it those of the current environment.

Virtual environments hold absolute paths (scripts, pyvenv.cfg), so one is built where it will stay, under a lock. Its
marker file is written last: an environment without a marker is unfinished and is built again.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ...errors import RequirementsError
from ...snapshot.publish import publish
from .requirements import check_requirements, installed_versions, parse_requirements, requirements_digest

_MARKER = "pilotflame-complete"
_PLACEHOLDER = "pilotflame-placeholder\n"
# .pth files are read in the order of their names. The last one adds its paths behind the environment's own.
_BASE_PTH = "zzzz_pilotflame_base.pth"
# Options of pip's configuration, and the variables that mean the same to uv.
_UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}


def ensure_environment(
    root: Path, requirements: str, progress: Callable[[str], None], *, deadline_s: float = 900.0
) -> Path:
    """Return the Python of the environment for `requirements` below `root`, and build it if it is not there yet.

    `progress` gets each line that uv writes. Blocks for as long as uv needs, at most `deadline_s` per command.
    """
    digest = requirements_digest(requirements)
    folder = root.absolute() / _key(digest)
    python = folder / "bin" / "python"
    root.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress) as lock_fd:
        uv = UvCommand(root, progress, lock_fd, deadline_s)
        # The interpreter is a link to one outside, which an upgrade may have removed.
        if not (folder / _MARKER).is_file() or not python.exists():
            _build(folder, requirements, uv)
            with publish(folder / _MARKER) as marker:
                marker.write(f"{digest}\n".encode())
        elif not _met(folder, requirements):
            # Not built anew: workers may be running in it.
            progress("the gateway's environment has changed: installing what it no longer has")
            _install(folder, uv)
    return python


def _key(digest: str) -> str:
    """Return the folder's name: the same requirements on another interpreter are another environment."""
    base = f"{digest}\n{sys.prefix}\n{sys.version}\n{os.pathsep.join(_base_paths())}".encode()
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    return f"py{version}-{hashlib.sha256(base).hexdigest()[:16]}"


def _base_paths() -> list[str]:
    """Return the site-packages of the current environment."""
    paths = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.insert(0, site.getusersitepackages())
    return [path for path in paths if Path(path).is_dir()]


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def _met(folder: Path, requirements: str) -> bool:
    _remove_placeholders(_site_packages(folder))
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
    """Install what the environment lacks of its requirements.txt. Raise RequirementsError."""
    file, pip_options = folder / "requirements.txt", _pip_options()
    arguments = ["--compile-bytecode", "--python", str(folder / "bin" / "python"), "-r", str(file)]
    # As with pip, one hash means that every package must have one.
    if any(line.hashes for line in parse_requirements(file.read_text(encoding="utf-8"))):
        arguments.append("--require-hashes")
    if pip_options.get("no-index", "0").lower() in ("1", "on", "true", "yes"):
        arguments.append("--no-index")
    with _placeholders(_site_packages(folder)):
        uv.run("pip", "install", *arguments, environ=_variables(pip_options))


@dataclass(frozen=True, slots=True)
class UvCommand:
    """Runs uv with its cache below `root`. Each line that uv writes goes to `progress`."""

    root: Path
    progress: Callable[[str], None]
    lock_fd: int
    """Inherited by uv: if this process is killed, the lock is held for as long as uv writes."""
    deadline_s: float

    def run(self, *arguments: str, environ: Mapping[str, str] = {}) -> None:
        """Run a command to its end. Raise RequirementsError if it fails or exceeds the deadline."""
        # Imported here because only installations need it.
        import uv  # noqa: PLC0415

        lines: deque[str] = deque(maxlen=20)
        end_s = time.monotonic() + self.deadline_s
        status = self._wait([uv.find_uv_bin(), "--no-config", *arguments], environ, lines)
        if status != 0:
            late = status < 0 and time.monotonic() >= end_s
            problem = f"did not finish within {self.deadline_s:g} s" if late else f"failed (status {status})"
            message = f"uv {problem} on requirements.txt; its last lines: \n" + "\n".join(lines)
            remedy = (
                "Correct requirements.txt, or check the package index and the network, then deploy again."
            )
            raise RequirementsError(message, remedy=remedy)

    def _wait(self, command: list[str], environ: Mapping[str, str], lines: deque[str]) -> int:
        """Return the exit status; `lines` gets the output's last lines."""
        # PYTHONPATH would show packages to uv that a worker does not see.
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={"UV_CACHE_DIR": str(self.root.absolute() / ".uv-cache"), **environ, **own},
            # uv starts build backends: all are killed as one process group.
            start_new_session=True,
            pass_fds=(self.lock_fd,),
        ) as process:
            deadline = threading.Timer(self.deadline_s, _kill, (process,))
            deadline.start()
            try:
                for line in process.stdout or ():
                    lines.append(line.rstrip())
                    self.progress(line.rstrip())
                return process.wait()
            finally:
                deadline.cancel()
                deadline.join()
                # Still running if `progress` raised.
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    # Once the process is reaped, its group's number may belong to another process.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _placeholders(site_packages: Path) -> Iterator[None]:
    """Show uv the current environment's packages as installed in `site_packages`.

    Each gets a *.dist-info with its metadata, and a RECORD of nothing else, so that uv can also replace it.
    """
    _remove_placeholders(site_packages)
    seen = {"", *installed_versions([str(site_packages)])}
    try:
        for distribution in metadata.distributions(path=_base_paths()):
            name = canonicalize_name(distribution.metadata["Name"] or "")
            if name not in seen:
                seen.add(name)
                _write_placeholder(site_packages, name, distribution)
        yield
    finally:
        _remove_placeholders(site_packages)


def _write_placeholder(site_packages: Path, name: str, distribution: metadata.Distribution) -> None:
    try:
        Version(distribution.version)
    except InvalidVersion:
        return
    folder = site_packages / f"{name.replace('-', '_')}-{distribution.version}.dist-info"
    texts = (distribution.read_text(file) for file in ("METADATA", "PKG-INFO", ""))
    files = {"METADATA": next(filter(None, texts), ""), "INSTALLER": _PLACEHOLDER}
    files["RECORD"] = "".join(f"{folder.name}/{file},,\n" for file in (*files, "RECORD"))
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")


def _remove_placeholders(site_packages: Path) -> None:
    """Remove the placeholders, also those that a killed process left."""
    for installer in site_packages.glob("*.dist-info/INSTALLER"):
        if installer.read_text(encoding="utf-8", errors="replace") == _PLACEHOLDER:
            shutil.rmtree(installer.parent)


def _variables(pip_options: Mapping[str, str]) -> dict[str, str]:
    """Return uv's environment variables that mean the same as pip's options."""
    # pip separates values with blanks; so does uv, except for find-links.
    variables: dict[str, str] = {}
    if "extra-index-url" in pip_options:
        # As with pip, the best version of all indexes is chosen, not the first index that has the package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    for option, variable in _UV_VARIABLES.items():
        if value := pip_options.get(option):
            variables[variable] = ("," if option == "find-links" else " ").join(value.split())
    return variables


def _pip_options() -> dict[str, str]:
    """Return pip's options from its configuration files and the PIP_* variables, as `index-url`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    options: dict[str, str] = {}
    # Lines as `global.index-url='https://...'`, sorted: those of the section `install` come last and win.
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in ("global", "install"):
            options[option] = str(ast.literal_eval(value))
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options
