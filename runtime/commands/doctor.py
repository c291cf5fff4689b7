"""The doctor: what of this machine functions need, whether it is there, and what to do if not."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from ..settings.gateway_settings import GatewaySettings
from .display import size

MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 512 << 20
MIN_OPEN_FILES = 256
GOOD_OPEN_FILES = 1024
# A unix socket's address, its closing zero included.
MAX_SOCKET_PATH_BYTES = 108
LINK_SOCKET = Path("run", "link.sock")
PROBE_BYTES = 64 << 20
SLOW_FORK_MS = 50.0
SLOW_READ_BYTES_S = 1 << 30

Verdict = Literal["ok", "note", "fail"]


class Check(NamedTuple):
    """One line of the examination. `note` is worth knowing; `fail` keeps functions from running."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(settings: GatewaySettings) -> Iterator[Check]:
    """All checks, in the order in which they are best mended."""
    yield _python()
    yield _linux()
    yield _fork()  # before torch is imported: its threads do not belong into a fork
    yield _state_dir(settings.state_dir)
    yield _unix_socket(settings.state_dir)
    yield _port(settings)
    yield _open_files()
    yield _processors()
    yield _memory()
    yield _page_cache()
    yield from _packages()
    yield _torch()


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        return Check("Python", "fail", found, "Install Python 3.11 or newer.")
    return Check("Python", "ok", found)


def _linux() -> Check:
    found = f"{platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Check(
            "Linux", "fail", found, "Functions run on Linux only; use a container or a virtual machine."
        )
    return Check("Linux", "ok", found)


def _fork() -> Check:
    started_s = time.monotonic()
    try:
        child = os.fork()
    except OSError as error:
        return Check(
            "fork", "fail", str(error), "Allow more processes: ulimit -u, or the container's pids limit."
        )
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    elapsed_ms = (time.monotonic() - started_s) * 1000
    slow = elapsed_ms > SLOW_FORK_MS
    return Check(
        "fork",
        "note" if slow else "ok",
        f"{elapsed_ms:.1f} ms",
        "Slow: is this machine busy?" if slow else "",
    )


def _state_dir(folder: Path) -> Check:
    there = next(place for place in (folder, *folder.parents) if place.exists())  # nothing is made to look
    try:
        with tempfile.TemporaryDirectory(dir=there):
            free_bytes = shutil.disk_usage(there).free
    except OSError as error:
        remedy = "Set PILOTFLAME_STATE_DIR to a folder that can be written."
        return Check("state folder", "fail", f"{folder}: {error.strerror}", remedy)
    scarce = free_bytes < MIN_FREE_BYTES
    remedy = "Make room, or set PILOTFLAME_STATE_DIR to a larger disk." if scarce else ""
    return Check("state folder", "note" if scarce else "ok", f"{folder}, {size(free_bytes)} free", remedy)


def _unix_socket(folder: Path) -> Check:
    length = len(os.fsencode(folder / LINK_SOCKET)) + 1
    if length > MAX_SOCKET_PATH_BYTES:
        found = f"{folder / LINK_SOCKET} is {length - MAX_SOCKET_PATH_BYTES} bytes too long"
        return Check("unix sockets", "fail", found, "Set PILOTFLAME_STATE_DIR to a shorter path.")
    try:
        with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(Path(place, "probe")))
    except OSError as error:
        return Check("unix sockets", "fail", str(error), "Put TMPDIR on a local disk.")
    return Check("unix sockets", "ok", "work")


def _port(settings: GatewaySettings) -> Check:
    where = f"{settings.host}:{settings.port}"
    try:
        with socket.create_server((settings.host, settings.port)):
            return Check("port", "ok", f"{where} is free")
    except OSError as error:
        remedy = "Is it your gateway? Otherwise set PILOTFLAME_PORT, or use serve --port."
        return Check("port", "note", f"{where}: {error.strerror}", remedy)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft}, at most {hard}"
    if soft < MIN_OPEN_FILES:
        return Check("open files", "fail", found, f"ulimit -n {GOOD_OPEN_FILES}")
    if soft < GOOD_OPEN_FILES:
        return Check("open files", "note", found, f"For many callers at once: ulimit -n {GOOD_OPEN_FILES}")
    return Check("open files", "ok", found)


def _processors() -> Check:
    usable = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    limited = f", limited to {quota:.1f} by the container" if quota is not None and quota < usable else ""
    return Check("processors", "ok", f"{usable} usable{limited}")


def _memory() -> Check:
    free_bytes = psutil.virtual_memory().available
    limit_bytes = _number(Path("/sys/fs/cgroup/memory.max"))
    held_bytes = _number(Path("/sys/fs/cgroup/memory.current")) or 0
    if limit_bytes is not None:
        free_bytes = min(free_bytes, max(0, limit_bytes - held_bytes))
    scarce = free_bytes < MIN_FREE_BYTES
    return Check(
        "memory", "note" if scarce else "ok", f"{size(free_bytes)} free", "Stop something." if scarce else ""
    )


def _page_cache() -> Check:
    """How fast mapped weights can be read once they are in memory."""
    buffer = bytearray(PROBE_BYTES)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(buffer)
            file.seek(0)
            started_s = time.monotonic()
            count = file.readinto(buffer)
            rate = (count or 0) / (time.monotonic() - started_s)
    except OSError as error:
        return Check("page cache", "note", str(error), "Make room on the temporary disk (TMPDIR).")
    slow = rate < SLOW_READ_BYTES_S
    return Check(
        "page cache",
        "note" if slow else "ok",
        f"{size(rate)}/s",
        "Slow: is this machine busy?" if slow else "",
    )


def _packages() -> Iterator[Check]:
    for package, purpose in (("transformers", "Hugging Face models"), ("safetensors", "saving weights")):
        try:
            yield Check(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            remedy = f"For {purpose}: pip install {package}"
            yield Check(package, "note", "not installed", remedy)


def _torch() -> Check:
    try:
        import torch  # noqa: PLC0415  seconds, and the other checks come first
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything; it is told
        found = "not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
        return Check(
            "torch", "note", found, "For neural networks: pip install torch safetensors numpy threadpoolctl"
        )
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{torch.__version__}, {torch.get_num_threads()} threads, {devices} GPUs"
    return Check("torch", "ok", found)


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or "max"
        return None
