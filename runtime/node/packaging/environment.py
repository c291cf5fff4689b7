"""Makes the Python environments of functions: one virtual environment per set of requirements, with uv.

Functions with the same requirements share a virtual environment. It extends the environment in which the gateway runs:
a .pth file makes the gateway's packages, such as torch and pilotflame, importable, so they are not installed again. If
a function needs another version of such a package, this version is installed in the virtual environment. Its packages
precede the gateway's packages on the path.

Virtual environments hold absolute paths and cannot be moved. So each environment is built in its final place, under a
lock. A marker file that names this place is written last. Without the marker, an environment is unfinished; with
another place in the marker, it was moved. In both cases it is built again. Backups do not contain environments. A
missing environment is built when a revision is launched.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ....errors import RequirementsError
from ....snapshot.publish import publish
from ..launching.process_launcher import python_path
from .requirements import check_requirements, installed_versions, parse_requirements, requirements_digest
from .streamed_command import run_streamed

_log = logging.getLogger(__name__)
# Called with each line about the deploy, including the lines that uv writes.
WriteLine = Callable[[str], None]
_MARKER = "pilotflame-complete"
_UV_CACHE = ".uv-cache"
# uv hard-links files of its cache into the environments that use them. This is the largest total size of all other
# files in the cache.
CACHE_BYTES = 2 << 30
# How long a command that shrinks the cache may take, and how long it waits for other commands of uv.
_SHRINK_S, _LOCK_S = 300.0, 5
# The name of an environment's folder, as `_key` makes it.
_FOLDER = re.compile(r"py[0-9]{2,4}-[0-9a-f]{16}")
_PLACEHOLDER = "pilotflame-placeholder\n"
# Python reads .pth files in the order of their names. With this name, it reads the file last, so the gateway's packages
# come after the packages of the virtual environment.
_BASE_PTH = "zzzz_pilotflame_base.pth"
# The environment variables of uv, by the names of pip's options with the same meaning.
_UV_VARIABLES = {
    "cert": "SSL_CERT_FILE", "constraint": "UV_CONSTRAINT", "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX", "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}  # fmt: skip


def ensure_environment(
    root: Path, requirements: str, progress: WriteLine, *, deadline_s: float = 900.0
) -> Path:
    """Return the path of the Python of the environment for `requirements`.

    The environment is built if it does not exist. If it needs packages that the gateway's environment has lost, they
    are installed. All environments are in the folder `root`. Blocks while another deploy builds the same environment,
    and until uv has finished, at most `deadline_s` per command. Raise RequirementsError if uv fails.
    """
    digest = requirements_digest(requirements)
    folder = root.absolute() / _key(digest)
    python = folder / "bin" / "python"
    root.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress) as lock_fd:
        uv = UvCommand(root, progress, lock_fd, deadline_s)
        if not _is_whole(folder):
            _build(folder, requirements, uv)
            with publish(folder / _MARKER) as marker:
                marker.write(f"{digest}\n{folder}\n".encode())
        elif not _met(folder, requirements):
            # Complete the environment instead of building it again, because workers may be running in it.
            progress("the gateway's environment has changed: installing what it no longer has")
            _install(folder, uv)
    return python


def present_python(root: Path, recorded: Path, requirements: str) -> Path | None:
    """Return the Python that runs a revision now. `recorded` is the Python at the revision's deploy.

    If `recorded` is in an environment, return None if the environment is missing in `root`. Otherwise `recorded` was
    the gateway's Python, so return the gateway's present Python.
    """
    if not is_environment(recorded):
        return Path(sys.executable)
    folder = root.absolute() / _key(requirements_digest(requirements))
    return folder / "bin" / "python" if _is_whole(folder) else None


def is_environment(python: Path) -> bool:
    """Return True if the path of a Python is in an environment, of any machine."""
    return any(_FOLDER.fullmatch(part) for part in python.parts)


def _is_whole(folder: Path) -> bool:
    """Return True if the environment was completed in this place, and its interpreter still exists."""
    marker = folder / _MARKER
    # Check the interpreter, too: it is a link to the gateway's interpreter, which an upgrade may have removed.
    if not marker.is_file() or not (folder / "bin" / "python").exists():
        return False
    return marker.read_text(encoding="utf-8").splitlines()[1:] == [str(folder)]


def discard_unused(root: Path, digests: Callable[[], Collection[str]]) -> int:
    """Remove the environments in `root` whose requirements are not among `digests()`. Return their number.

    If there are no environments, `digests` is not called, because it reads the records of all revisions.

    An environment that another deploy is building stays. If a function's environment is missing, it is built again.
    """
    if not (folders := list(root.glob("py*-*/"))):
        return 0
    kept, removed = {_key(digest) for digest in digests()}, 0
    for folder in folders:
        if folder.name not in kept:
            with contextlib.suppress(BlockingIOError), _locked(folder.with_name(f"{folder.name}.lock")):
                # Remove the marker first: if a crash leaves a part of the folder, the part counts as an unfinished
                # environment.
                (folder / _MARKER).unlink(missing_ok=True)
                shutil.rmtree(folder)
                removed += 1
    return removed


def shrink_cache(root: Path) -> None:
    """Make uv remove downloaded and built files, if more than CACHE_BYTES of its cache are in no environment.

    Wheels that uv has built are kept, unless they alone have more than CACHE_BYTES. A cache that UV_CACHE_DIR names is
    not touched. Blocks while uv removes files.
    """
    cache = root / _UV_CACHE
    if not cache.is_dir() or "UV_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(BlockingIOError), _locked(root / f"{_UV_CACHE}.lock") as lock_fd:
        uv = UvCommand(root, _log.debug, lock_fd, _SHRINK_S)
        try:
            for command in (("prune", "--ci"), ("clean",)):
                if _unshared_bytes(cache) > CACHE_BYTES:
                    uv.run("cache", *command, environ={"UV_LOCK_TIMEOUT": f"{_LOCK_S}"})
        except RequirementsError as error:
            _log.warning("the cache of uv in %s stays too large: %s", cache, error.message)


def _unshared_bytes(folder: Path) -> int:
    """Return the size of the files that have no other hard link."""
    total = 0
    for path in folder.rglob("*"):
        # uv may remove files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            total += facts.st_size if facts.st_nlink == 1 else 0
    return total


def _key(digest: str) -> str:
    """Return the name of the environment's folder, which depends on the requirements and the interpreter."""
    base = f"{digest}\n{sys.prefix}\n{sys.version}\n{os.pathsep.join(_base_paths())}".encode()
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    return f"py{version}-{hashlib.sha256(base).hexdigest()[:16]}"


def _base_paths() -> list[str]:
    """Return the folders of packages of the environment in which the gateway runs."""
    paths = [*python_path(), *site.getsitepackages()]
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
def _locked(path: Path, progress: WriteLine | None = None) -> Iterator[int]:
    """Hold a lock on the file `path`, so that only one deploy builds an environment. Yield the file's descriptor.

    If another deploy holds the lock, wait for it. Without `progress`, raise BlockingIOError instead.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is None:
                raise
            progress("waiting for another deploy that builds the same environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(folder: Path, requirements: str, uv: UvCommand) -> None:
    if folder.exists():
        uv.progress("removing an environment that is unfinished or was moved")
        shutil.rmtree(folder)
    uv.progress(f"creating {folder}")
    uv.run("venv", "--quiet", "--no-project", "--python", sys.executable, str(folder))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _base_paths()]
    (_site_packages(folder) / _BASE_PTH).write_text("".join(lines), encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    _install(folder, uv)


def _install(folder: Path, uv: UvCommand) -> None:
    """Install the packages that the environment lacks to meet its requirements.txt. Raise RequirementsError if uv
    fails.
    """
    file, pip_options = folder / "requirements.txt", _pip_options()
    arguments = ["--compile-bytecode", "--python", str(folder / "bin" / "python"), "-r", str(file)]
    # As in pip: if any line has a hash, then every package needs a hash.
    if any(line.hashes for line in parse_requirements(file.read_text(encoding="utf-8"))):
        arguments.append("--require-hashes")
        # Leave out the constraints: all versions are pinned, and uv refuses constraints that do not pin a version.
        pip_options = {name: value for name, value in pip_options.items() if name != "constraint"}
    if pip_options.get("no-index", "0").lower() in ("1", "on", "true", "yes"):
        arguments.append("--no-index")
    with _placeholders(_site_packages(folder)):
        uv.run("pip", "install", *arguments, environ=_variables(pip_options))


@dataclass(frozen=True, slots=True)
class UvCommand:
    """Runs commands of uv.

    The cache of uv is in the folder `root`, unless UV_CACHE_DIR is set. A command that takes longer than
    `deadline_s` is killed.
    """

    root: Path
    progress: WriteLine
    lock_fd: int
    """The descriptor of the locked file. uv inherits the descriptor, so that uv holds the lock if the gateway is killed."""
    deadline_s: float

    def run(self, *arguments: str, environ: Mapping[str, str] = {}) -> None:
        """Run a command of uv until it ends. Raise RequirementsError if it fails or exceeds the deadline.

        `environ` are additional variables. Variables of the gateway's environment take precedence over them.
        """
        # Imported here because only installations need it.
        import uv  # noqa: PLC0415

        # Leave out PYTHONPATH and PYTHONHOME. With them, uv could find packages that a worker does not find.
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        ended = run_streamed(
            [uv.find_uv_bin(), "--no-config", *arguments], self.progress, deadline_s=self.deadline_s,
            environ={"UV_CACHE_DIR": str(self.root.absolute() / _UV_CACHE), **environ, **own},
            pass_fds=(self.lock_fd,),
        )  # fmt: skip
        if ended.failed:
            late = f"did not finish within {self.deadline_s:g} s"
            problem = late if ended.late else f"failed (status {ended.status})"
            place = "" if arguments[0] == "cache" else " on requirements.txt"
            message = f"uv {problem}{place}; its last lines: \n" + "\n".join(ended.lines)
            remedy = "Correct requirements.txt, or check the package index and the network."
            raise RequirementsError(message, remedy=remedy)


@contextlib.contextmanager
def _placeholders(site_packages: Path) -> Iterator[None]:
    """During the block, make uv regard the gateway's packages as installed. uv looks only in `site_packages`.

    The placeholder of a package is a *.dist-info folder with its metadata. Its RECORD lists only the files of
    this folder, so that uv can remove the placeholder to install another version.
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
    """Remove all placeholders, including those that a killed process has left."""
    for installer in site_packages.glob("*.dist-info/INSTALLER"):
        if installer.read_text(encoding="utf-8", errors="replace") == _PLACEHOLDER:
            shutil.rmtree(installer.parent)


def _variables(pip_options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that have the same effect on uv as `pip_options` have on pip."""
    # pip and uv separate the values of an option with blanks, but uv separates the values of find-links with commas.
    variables: dict[str, str] = {}
    if "extra-index-url" in pip_options:
        # Choose the best version of all indexes, as pip does. uv's default is the first index with a package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    for option, variable in _UV_VARIABLES.items():
        if value := pip_options.get(option):
            variables[variable] = ("," if option == "find-links" else " ").join(value.split())
    return variables


def _pip_options() -> dict[str, str]:
    """Return the options in pip's configuration files and PIP_* variables, by names such as `index-url`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    options: dict[str, str] = {}
    # The lines are like `global.index-url='https://...'` and sorted. So the lines of the section `install` come after
    # the lines of `global`, and override them.
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in ("global", "install"):
            options[option] = str(ast.literal_eval(value))
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options
