"""The command `uv`, run for one environment, with pip's configuration.

uv regards a package as installed only if it is in the environment's own site-packages. `placeholders` shows it those of
the environment that is extended.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
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
from .requirements import installed_versions, parse_requirements

_PLACEHOLDER = "pilotflame-placeholder\n"
_KEPT_LINES = 20
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


@dataclass(frozen=True, slots=True)
class UvCommand:
    """Runs uv with its cache below `root`. Each line that uv writes goes to `progress`."""

    root: Path
    progress: Callable[[str], None]
    lock_fd: int
    """Inherited by uv: if this process is killed, the lock is held for as long as uv writes."""
    deadline_s: float

    def install(self, python: Path, requirements: Path) -> None:
        """Install what `python` lacks of the file `requirements`. Raise RequirementsError."""
        pip_options = _pip_options()
        arguments = ["--compile-bytecode", "--python", str(python), "-r", str(requirements)]
        # As with pip, one hash means that every package must have one.
        if any(line.hashes for line in parse_requirements(requirements.read_text(encoding="utf-8"))):
            arguments.append("--require-hashes")
        if pip_options.get("no-index", "0").lower() in ("1", "on", "true", "yes"):
            arguments.append("--no-index")
        self.run("pip", "install", *arguments, environ=_variables(pip_options))

    def run(self, *arguments: str, environ: Mapping[str, str] = {}) -> None:
        """Run a command to its end. Raise RequirementsError if it fails or exceeds the deadline."""
        # Imported here because only installations need it.
        import uv  # noqa: PLC0415

        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        status = self._wait([uv.find_uv_bin(), "--no-config", *arguments], environ, lines)
        last = "\n" + "\n".join(lines)
        if status is None:
            raise RequirementsError(
                f"uv did not finish requirements.txt within {self.deadline_s:g} s; its last lines: {last}",
                remedy="Check the package index and the network, then deploy again.",
            )
        if status != 0:
            raise RequirementsError(
                f"uv could not make the environment for requirements.txt (status {status}); its last lines: {last}",
                remedy="Correct requirements.txt so that `uv pip install -r requirements.txt` succeeds.",
            )

    def _wait(self, command: list[str], environ: Mapping[str, str], lines: deque[str]) -> int | None:
        """Return the exit status, or None if the deadline passed; `lines` gets the output's last lines."""
        # PYTHONPATH would show packages to uv that a worker does not see.
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        end_s = time.monotonic() + self.deadline_s
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
                status = process.wait()
            finally:
                deadline.cancel()
                deadline.join()
                # Still running if `progress` raised.
                _kill(process)
        return None if status < 0 and time.monotonic() >= end_s else status


def _kill(process: subprocess.Popen[str]) -> None:
    # Once the process is reaped, its group's number may belong to another process.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def placeholders(site_packages: Path, base_paths: list[str]) -> Iterator[None]:
    """Show uv the packages on `base_paths` as installed in `site_packages`.

    Each gets a *.dist-info with its metadata, and a RECORD of nothing else, so that uv can also replace it.
    """
    remove_placeholders(site_packages)
    seen = set(installed_versions([str(site_packages)]))
    try:
        for distribution in metadata.distributions(path=base_paths):
            name = canonicalize_name(distribution.metadata["Name"] or "")
            if name and name not in seen:
                seen.add(name)
                _write_placeholder(site_packages, name, distribution)
        yield
    finally:
        remove_placeholders(site_packages)


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


def remove_placeholders(site_packages: Path) -> None:
    """Remove the placeholders, also those that a killed process left."""
    for installer in site_packages.glob("*.dist-info/INSTALLER"):
        if installer.read_text(encoding="utf-8", errors="replace") == _PLACEHOLDER:
            shutil.rmtree(installer.parent)


def _variables(pip_options: Mapping[str, str]) -> dict[str, str]:
    """Return uv's environment variables that mean the same as pip's options."""
    # pip separates values with blanks; so does uv, except for find-links.
    variables = {
        variable: ("," if option == "find-links" else " ").join(pip_options[option].split())
        for option, variable in _UV_VARIABLES.items()
        if pip_options.get(option)
    }

    if "extra-index-url" in pip_options:
        # As with pip, the best version of all indexes is chosen, not the first index that has the package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
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
    variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return options | {
        name.removeprefix("PIP_").lower().replace("_", "-"): value for name, value in variables.items()
    }
