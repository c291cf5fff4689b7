"""Launches zygotes and workers as processes of the gateway's machine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from ...._version import __version__
from ....errors import HandlerError, LauncherError
from ...calls.link.child import KILLED_S
from ...calls.link.worker_spec import Confinement, WorkerSpec
from ...ground.telemetry.logs import Log, LogChannel
from ...ground.telemetry.refusals import Operation, refusal
from .child_output import ChildOutput
from .confinements import Confinements
from .gpus import ASK_WITHOUT_USE, PREFIXES
from .launcher import NO_SECRETS
from .listener import Listener
from .started_process import StartedProcess
from .zygote_process import ChildProcess, ZygoteProcess, ZygoteSource

LOG = logging.getLogger(__name__)
# How long a base may take to start. Importing large packages from a disk that is not cached is slow.
BASE_TIMEOUT_S = 300.0
# How long a base may take to end after its link is closed. Then it is killed.
BASE_EXIT_S = 10.0
# The variables of the gateway's environment that functions inherit. They contain no credentials. docs/environment.md lists them.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "VIRTUAL_ENV",
             "LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
             "AWS_CA_BUNDLE", "GLIBC_TUNABLES", "NLTK_DATA", "MPLCONFIGDIR", "NUMBA_CACHE_DIR",
             "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE")  # fmt: skip
INHERITED_PREFIXES = ("LC_", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "KMP_", "COVERAGE_", "MALLOC_", "TORCH_",
                      *PREFIXES)  # fmt: skip
# Programs read these variables in upper and in lower case. A URL with a user name or a password is not passed.
PROXIES = ("NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
SECRET_ENDINGS = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
# These variables stop libraries from starting thread pools at import, because a zygote must not have threads. In
# workers, `fork_safety.set_threads` raises the thread counts of torch, BLAS and numexpr again.
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                   "ORT_DISABLE_TELEMETRY": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # fmt: skip


# The key of a base: the path of its Python, and the packages that it imports.
BaseKey = tuple[str, tuple[str, ...]]


class ProcessLauncher:
    """Runs one base for each Python environment and set of preloaded packages, and forks zygotes from it."""

    def __init__(self, listener: Listener, tasks: asyncio.TaskGroup, state: Path, cache: Path) -> None:
        """`state` is the state folder of the gateway, `cache` the node's cache of fetched snapshots."""
        self._listener, self._tasks = listener, tasks
        self._confinements = Confinements(state, cache)
        self._removing_left = tasks.create_task(asyncio.to_thread(self._confinements.remove_left))
        # The specs and their confinements, by the id of the spec. An entry keeps its spec in memory, so that no other
        # spec gets the same id. Threads make the confinements.
        self._confined: dict[int, tuple[WorkerSpec, asyncio.Future[Confinement]]] = {}
        self._bases: dict[BaseKey, ZygoteProcess] = {}
        # For each base, what `_installed` returned when the base was last started or used.
        self._seen: dict[BaseKey, int] = {}
        # Bases that were replaced. `_end_replaced` ends each of them once it has no child any more.
        self._replaced: list[ZygoteProcess] = []
        self._starting: dict[BaseKey, asyncio.Lock] = {}
        # The ids of the specs that need a base, by the base's key. The revisions keep the specs in memory.
        self._specs: dict[BaseKey, set[int]] = {}
        self._processes: set[StartedProcess] = set()
        # The tasks that wait for the ends of `_processes`.
        self._reaping: set[asyncio.Task[None]] = set()
        self._closed = False

    async def launch(
        self,
        spec: WorkerSpec,
        logs: Log,
        on_death: Callable[[], None],
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> ZygoteSource:
        confinement = await self._confine(spec)
        # Get the base last, and fork at once: `end_unused` ends a base that has no child and forks none.
        base = await self._base(spec)
        try:
            return await base.launch(spec, logs, on_death, secrets, confinement)
        except HandlerError as error:
            _name_dropped(
                error, spec.env.keys() | secrets.keys() | SINGLE_THREADED.keys() | ASK_WITHOUT_USE.keys()
            )
            raise

    async def _confine(self, spec: WorkerSpec) -> Confinement:
        if (known := self._confined.get(id(spec))) is None:
            made = asyncio.get_running_loop().run_in_executor(None, self._confinements.make, spec)
            known = self._confined[id(spec)] = spec, made
            made.add_done_callback(lambda _: self._drop_failed(spec, made))
        # Shield the future: the thread goes on if the caller is cancelled, and `forget` removes the confinement that it
        # makes.
        return await asyncio.shield(known[1])

    def _drop_failed(self, spec: WorkerSpec, made: asyncio.Future[Confinement]) -> None:
        if (made.cancelled() or made.exception() is not None) and id(spec) in self._confined:
            del self._confined[id(spec)]

    async def _remove(self, made: asyncio.Future[Confinement]) -> None:
        await asyncio.wait([made])
        if not made.cancelled() and made.exception() is None:
            await asyncio.to_thread(self._confinements.remove, made.result())

    async def prepare(self, spec: WorkerSpec) -> None:
        await self._base(spec)

    async def provide(self, _spec: WorkerSpec) -> bool:
        """Do nothing: the deploy has already brought everything that a process needs."""
        return False

    async def forget(self, spec: WorkerSpec) -> None:
        await self._forget_base(spec)
        if (known := self._confined.pop(id(spec), None)) is not None:
            await self._remove(known[1])

    async def _forget_base(self, spec: WorkerSpec) -> None:
        specs = self._specs.get(key := _key(spec), set())
        specs.discard(id(spec))
        if specs or key not in self._specs:
            return
        del self._specs[key]
        # Keep a lock that a launch holds: launches that come meanwhile wait for that lock, and then use the same base.
        # There may be no lock: an earlier call may have removed it while a launch still waited for it.
        if (lock := self._starting.get(key)) is not None and not lock.locked():
            del self._starting[key]
        if (base := self._bases.pop(key, None)) is not None:
            base.close()
            base.child.kill_after(BASE_EXIT_S)
            await base.child.wait_killed(BASE_EXIT_S + KILLED_S)

    def base_pids(self) -> list[int]:
        return [base.child.pid for base in (*self._bases.values(), *self._replaced) if base.alive]

    def end_unused(self) -> None:
        for key, base in list(self._bases.items()):
            if base.childless:
                del self._bases[key]
                base.close()
                base.child.kill_after(BASE_EXIT_S)
        self._end_replaced()

    def _end_replaced(self) -> None:
        for base in [one for one in self._replaced if one.childless]:
            self._replaced.remove(base)
            base.close()
            base.child.kill_after(BASE_EXIT_S)

    async def close(self) -> None:
        self._closed = True
        for base in (*self._bases.values(), *self._replaced):
            base.close()
        for end in (StartedProcess.terminate, StartedProcess.kill):
            for process in self._processes:
                end(process)
            if self._reaping:
                await asyncio.wait(self._reaping, timeout=BASE_EXIT_S)
        # Wait for launches that are just spawning a base. Such a launch finds that the launcher is closed, and kills
        # its base.
        for lock in list(self._starting.values()):
            async with lock:
                pass
        if self._reaping:
            await asyncio.wait(self._reaping, timeout=BASE_EXIT_S)
        for _, made in list(self._confined.values()):
            await self._remove(made)
        await asyncio.wait([self._removing_left])
        await asyncio.to_thread(self._confinements.close)

    async def _base(self, spec: WorkerSpec) -> ZygoteProcess:
        key = _key(spec)
        self._specs.setdefault(key, set()).add(id(spec))
        async with self._starting.setdefault(key, asyncio.Lock()):
            self._check_open()
            self._end_replaced()
            installed = await asyncio.to_thread(_installed, key[0])
            base = self._bases.get(key)
            if base is None or not base.alive:
                base = self._bases[key] = await self._start_base(*key)
            elif installed and installed != self._seen[key]:
                base = await self._replace(key, base)
            self._seen[key] = installed
            # Add the entry again: `forget` may have removed it while the base started, and the next call of `forget`
            # needs it.
            self._specs.setdefault(key, set()).add(id(spec))
            return base

    async def _replace(self, key: BaseKey, base: ZygoteProcess) -> ZygoteProcess:
        """Return a new base, which has imported the packages that are installed now. A fork of `base` would mix modules
        of the old and the new packages. If the new base does not start, because an installation is running, return
        `base`.
        """
        try:
            newer = await self._start_base(*key)
        except LauncherError as error:
            LOG.warning("packages were installed, and a new base does not start yet: %s", error)
            return base
        self._bases[key] = newer
        self._replaced.append(base)
        return newer

    async def _start_base(self, python: str, preload: tuple[str, ...]) -> ZygoteProcess:
        name = f"base {' '.join(preload)}".strip()
        dialled: asyncio.Future[ChildProcess] = asyncio.get_running_loop().create_future()
        token = self._listener.expect(
            "zygote", name, LogChannel(),
            lambda link, pid, _: dialled.set_result(ChildProcess(link, pid, name, reaped=True)),
        )  # fmt: skip
        try:
            request = {"address": str(self._listener.path), "token": token, "preload": preload}
            output = ChildOutput(name)
            process = await _spawn_base(python, request, output)
            self._processes.add(process)
            ended = self._tasks.create_task(self._reap(process, dialled, name, output))
            self._reaping.add(ended)
            ended.add_done_callback(self._reaping.discard)
            try:
                self._check_open()
                async with asyncio.timeout(BASE_TIMEOUT_S):
                    base = ZygoteProcess(await dialled, self._listener)
                await base.wait_built(BASE_TIMEOUT_S)
            except BaseException as error:
                # Kill the process here: nothing else refers to it, for example if the caller was cancelled.
                dialled.cancel()
                process.kill()
                if not isinstance(error, TimeoutError):
                    raise
                await ended
                raise LauncherError(f"{name} did not start within {BASE_TIMEOUT_S:.0f} s.") from None
        finally:
            self._listener.forget(token)
        return base

    def _check_open(self) -> None:
        if self._closed:
            raise LauncherError("The gateway is shutting down.")

    async def _reap(
        self, process: StartedProcess, dialled: asyncio.Future[ChildProcess], name: str, output: ChildOutput
    ) -> None:  # fmt: skip
        code = await process.wait()
        self._processes.discard(process)
        remedy = "Run `pilotflame doctor`, and see `pilotflame logs` for its output."
        error = output.end(f"The {name} process ended with code {code} before it was ready", remedy)
        if not dialled.done():
            dialled.set_exception(error)


def _installed(python: str) -> int:
    """Return a number that changes when packages are installed for the gateway's Python. Return 0 if running bases of
    `python` must not be replaced. This is so for another Python, because its packages do not change. It is also so
    after an upgrade of pilotflame, because only the next gateway can use bases of the new release.
    """
    if python != sys.executable or importlib.metadata.version("pilotflame") != __version__:
        return 0
    folders = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return sum(folder.stat().st_mtime_ns for folder in folders if folder.is_dir())


def _key(spec: WorkerSpec) -> BaseKey:
    return spec.python or sys.executable, spec.preload


async def _spawn_base(python: str, request: dict[str, Any], output: ChildOutput) -> StartedProcess:
    stdin, writes = os.pipe()
    with os.fdopen(writes, "wb", buffering=0) as pipe:
        # Do not block. The request fits into the buffer of a pipe, because it names only packages of a fixed list.
        os.set_blocking(writes, False)
        pipe.write(json.dumps(request).encode())
    try:
        return await StartedProcess.start(
            (python, "-m", "pilotflame.zygote", "base"),
            stdin=stdin, stdout=output.fileno(), stderr=output.fileno(), env=environment(python),
        )  # fmt: skip
    except OSError as error:
        output.close()
        refused = refusal(Operation.PYTHON, error.errno, "Run `pilotflame doctor`.")
        whole = LauncherError(f"{python} cannot be started: {refused.why}.", remedy=refused.remedy)
        message = f"The function's Python cannot be started: {refused.why}."
        # Only owners get the path.
        raise LauncherError(message, remedy=refused.remedy, details={"fault": whole.to_wire()}) from error
    finally:
        os.close(stdin)
        output.started()


def environment(python: str) -> dict[str, str]:
    """Return the environment variables of a base that runs `python`: the variables of the gateway that functions
    inherit, SINGLE_THREADED and ASK_WITHOUT_USE.
    """
    kept = {key: value for key, value in os.environ.items() if _passes(key, value)}
    # Set PYTHONPATH only for the gateway's Python. In an environment of requirements, a .pth file names these folders,
    # so that they come after the packages of the requirements.
    if python == sys.executable and (folders := python_path()):
        kept["PYTHONPATH"] = os.pathsep.join(folders)
    return {**kept, **SINGLE_THREADED, **ASK_WITHOUT_USE, "PYTHONUNBUFFERED": ""}


def _passes(key: str, value: str) -> bool:
    """Return True if functions inherit a variable of the gateway."""
    if key.upper() in PROXIES:
        return "@" not in value
    return (key in INHERITED or key.startswith(INHERITED_PREFIXES)) and not key.endswith(SECRET_ENDINGS)


def _name_dropped(error: HandlerError, given: Set[str]) -> None:
    """Say in the remedy of a failed import that the function does not inherit the variable that the import lacks.

    `given` are the variables that the function gets in other ways. Name only the variable that the import lacks: the
    function's code must not learn which other variables the gateway has.
    """
    found = re.search(r": KeyError: '(\w{2,})'$", error.message)
    name = found[1] if found and error.details.get("exception") == "KeyError" else ""
    if name in os.environ.keys() - given and not _passes(name, os.environ[name]):
        dropped = f"Functions do not inherit {name} of the gateway: set env in pilotflame.toml."
        error.remedy = f"{error.remedy} {dropped}".strip()


def python_path() -> list[str]:
    """Return the entries of the gateway's PYTHONPATH. They are absolute: functions have another working folder."""
    return [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
