"""The command that checks whether this machine can run functions: `pilotflame doctor`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import click

from ....errors import GatewayError, PackageMissing, PilotflameError, SourceError
from ....machine import free_memory_bytes, processors
from ....snapshot.extras import needs
from ...calls.worker.confinement import SINCE_SCOPE, landlock_version
from ...front.listening.tls import examine_hosts
from ...ground.access.keyring import stored_keys
from ...ground.settings.gateway_settings import GatewaySettings
from ...ground.settings.state_dir import is_disk_full
from ...ground.storing.open_documents import open_documents
from ...node.launching import gpus
from ...node.launching.cgroups import CONTROLLERS, find_controllers
from ...node.launching.container_engine import find_engine
from ..client import display, exit_codes, options

MIN_FREE_BYTES = 512 << 20
MIN_OPEN_FILES = 256
GOOD_OPEN_FILES = 1024
# The longest path of a unix socket, including its final zero byte.
MAX_SOCKET_PATH_BYTES = 108
LINK_SOCKET = Path("run", "link.sock")
NO_SNAPSHOT = "0" * 64
PROBE_BYTES = 64 << 20
SLOW_FORK_MS = 50.0
SLOW_DATABASE_MS = 5.0
# A larger difference between the clocks makes the times of jobs noticeably wrong.
CLOCK_S = 5.0
SLOW_READ_BYTES_S = 1 << 30
SLOW = "Slow: check whether this machine is busy."

Verdict = Literal["ok", "note", "fail"]


class Check(NamedTuple):
    """The result of one check: "fail" if no function can run, "note" if some functions cannot run or are slow."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


@click.command()
@options.state_dir
@options.as_json
def doctor(state_dir: Path | None, as_json: bool) -> None:
    """Check whether this machine has what functions need, and how fast it is.

    Exit code 1 if something necessary is missing; the table says what to do.

    Example: pilotflame doctor
    """
    settings = options.gateway_settings(state_dir=state_dir)
    with display.spinner("checking"):
        checks = list(examine(settings))
    if as_json:
        display.print_json({"checks": [check._asdict() for check in checks]})
    else:
        rows = [(check.verdict, check.name, check.found, check.remedy) for check in checks]
        display.print_table(("", "what", "found", "what to do"), rows)
    if any(check.verdict == "fail" for check in checks):
        raise click.exceptions.Exit(exit_codes.ERROR)


def examine(settings: GatewaySettings) -> Iterator[Check]:
    """Yield the results of all checks. A check comes before the checks that depend on it."""
    yield Check("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    remedy = "" if sys.platform == "linux" else "Use a container or a virtual machine with Linux."
    yield Check("Linux", "fail" if remedy else "ok", f"{platform.system()} {platform.release()}", remedy)
    # Check this before torch is imported: torch starts threads, and a process with threads must not fork.
    yield _fork()
    yield _state_dir(settings.state_dir)
    yield _unix_socket(settings.state_dir)
    yield _port(settings)
    yield _open_files()
    yield _processors()
    yield _memory()
    yield _page_cache()
    yield from _packages()
    yield _torch()
    yield from _gpus()
    yield _limits()
    yield private_files(landlock_version())
    yield containers(settings, settings.engine or find_engine())
    yield from (_noted(*found) for found in examine_hosts(settings))
    if settings.peers and settings.peers_token is not None:
        yield peers_answer(settings.peers, settings.peers_token.get_secret_value())
    if settings.database is not None:
        yield database_answers(settings.database.get_secret_value())


def _noted(name: str, found: str, remedy: str) -> Check:
    """Return a check with the verdict "note" if there is a remedy, and "ok" if `remedy` is empty."""
    return Check(name, "note" if remedy else "ok", found, remedy)


def _fork() -> Check:
    started_s = time.monotonic()
    try:
        child = os.fork()
    except OSError as error:
        return Check("fork", "fail", str(error), "Raise ulimit -u, or the container's limit of processes.")
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    elapsed_ms = (time.monotonic() - started_s) * 1000
    return _noted("fork", f"{elapsed_ms:.1f} ms", SLOW if elapsed_ms > SLOW_FORK_MS else "")


def _state_dir(folder: Path) -> Check:
    # The folder may not exist yet, and a check must not create it. So check the closest folder above that exists.
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            free_bytes = shutil.disk_usage(existing).free
    except OSError as error:
        remedy = "Set PILOTFLAME_STATE_DIR to a writable folder."
        return Check("state folder", "fail", f"{folder}: {error.strerror}", remedy)
    found = f"{folder}, {display.size(free_bytes)} free"
    remedy = "Free space, or set PILOTFLAME_STATE_DIR to a larger disk."
    if is_disk_full(existing):
        return Check("state folder", "fail", f"{found}: a gateway here is not ready", remedy)
    return _noted("state folder", found, remedy if free_bytes < MIN_FREE_BYTES else "")


def _unix_socket(folder: Path) -> Check:
    excess = len(os.fsencode(folder / LINK_SOCKET)) + 1 - MAX_SOCKET_PATH_BYTES
    if excess > 0:
        found = f"{folder / LINK_SOCKET} is {excess} bytes too long"
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
        remedy = "If it is not your gateway, set PILOTFLAME_PORT or pass serve --port."
        return Check("port", "note", f"{where}: {error.strerror}", remedy)


def peers_answer(urls: Sequence[str], token: str) -> Check:
    """Check which peers of this node answer. Peers are gateways that serve chunks of snapshots to each other."""
    # Imported here because most nodes have no peers.
    from ....snapshot.peering.peer import Peer, PeerList  # noqa: PLC0415

    nodes, faults = PeerList(urls).nodes(), []
    for node in nodes:
        peer = Peer(node, token)
        try:
            peer.position_of(NO_SNAPSHOT, settled=False)
        except SourceError as error:
            faults.append(error)
        finally:
            peer.close()
    found = f"{len(nodes) - len(faults)} of {len(nodes)} answer{''.join(f'; {error.message}' for error in faults)}"
    missing = "Start them, and let this machine reach their PILOTFLAME_PEERS_PORT."
    remedy = next((error.remedy for error in faults if error.remedy), missing) if faults or not nodes else ""
    return _noted("peers", found, remedy)


def database_answers(url: str) -> Check:
    """Check the database that gateways share: its version, the time of a round trip, its clock, and its tables."""
    try:
        with needs("The setting database", "psycopg"):
            # Imported here because most gateways have no database.
            from ...ground.storing.postgres import examine_database  # noqa: PLC0415
        facts = examine_database(url)
    except PilotflameError as error:
        return Check("database", "fail", error.message, error.remedy or "")
    missing = f"; the next gateway that starts adds {', '.join(facts.missing)}" if facts.missing else ""
    found = f"PostgreSQL {facts.version}, {facts.round_trip_ms:.1f} ms away, its clock {facts.ahead_s:+.1f} s{missing}"
    remedy = ""
    if not facts.may_create:
        remedy = "Let the user of the setting `database` create tables: GRANT CREATE ON SCHEMA."
    elif facts.round_trip_ms > SLOW_DATABASE_MS:
        remedy = "Each job takes several round trips: run the gateway in the same zone as the database."
    elif abs(facts.ahead_s) > CLOCK_S:
        remedy = "Let both machines set their clocks, for example with chrony."
    return _noted("database", found, remedy)


def _open_files() -> Check:
    # Check the hard limit, because the gateway raises its soft limit to the hard limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found, remedy = str(hard), f"ulimit -Hn {GOOD_OPEN_FILES}"
    if hard < MIN_OPEN_FILES:
        return Check("open files", "fail", found, remedy)
    few = f"For many simultaneous callers: {remedy}" if hard < GOOD_OPEN_FILES else ""
    return _noted("open files", found, few)


def _processors() -> Check:
    usable, allowed = len(os.sched_getaffinity(0)), processors()
    limited = f", limited to {allowed:.1f} by a cgroup" if allowed < usable else ""
    return Check("processors", "ok", f"{usable} usable{limited}")


def _memory() -> Check:
    free_bytes = free_memory_bytes()
    remedy = "Stop another program." if free_bytes < MIN_FREE_BYTES else ""
    return _noted("memory", f"{display.size(free_bytes)} free", remedy)


def _page_cache() -> Check:
    """Measure the rate at which weights in the page cache can be read."""
    buffer = bytearray(PROBE_BYTES)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(buffer)
            file.seek(0)
            started_s = time.monotonic()
            count = file.readinto(buffer)
            rate = (count or 0) / (time.monotonic() - started_s)
    except OSError as error:
        return Check("page cache", "note", str(error), "Free space on the temporary disk (TMPDIR).")
    return _noted("page cache", f"{display.size(rate)}/s", SLOW if rate < SLOW_READ_BYTES_S else "")


def _packages() -> Iterator[Check]:
    for package, purpose in (("transformers", "Hugging Face models"), ("safetensors", "saving weights")):
        try:
            yield Check(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Check(package, "note", "not installed", f"For {purpose}: pip install {package}")


def _torch() -> Check:
    try:
        # The import of torch takes seconds, so it comes after most of the other checks.
        import torch  # noqa: PLC0415
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything
        found = "not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
        remedy = "For neural networks: pip install torch safetensors numpy threadpoolctl"
        return Check("torch", "note", found, remedy)
    found = f"{torch.__version__}, {torch.get_num_threads()} threads"
    from ....snapshot.restoring.device import cuda  # noqa: PLC0415

    try:
        return Check("torch", "ok", f"{found}, GPUs: {'; '.join(cuda.described()) or 'none'}")
    except RuntimeError as error:
        remedy = "Install a driver that fits torch's CUDA: workers cannot use the GPUs."
        return Check("torch", "note", f"{found}, GPUs that cannot be used: {error}", remedy)


def _gpus() -> Iterator[Check]:
    """Yield a check of the GPUs that functions with resources.gpus share. Yield nothing if this machine has no GPU driver."""
    driver = gpus.find_driver()
    if found := driver.uses():
        used = [
            f"{one.id} ({one.name}, {one.used_bytes >> 20} of {one.memory_bytes >> 20} MiB used)"
            for one in found
        ]
        yield Check("GPUs", "ok", "; ".join(used))
    elif gpus.exist():
        remedy = f"pip install {driver.package}, or say which GPUs there are: PILOTFLAME_GPUS=0:81920"
        yield Check("GPUs", "note", f"{driver.library} does not tell which there are", remedy)


def _limits() -> Check:
    """Check which limits of `[resources]` this user can set for processes, and name the versions of cgroups that set them."""
    found = find_controllers()
    held = [setting for name, setting in CONTROLLERS.items() if name in {one.name for one in found}]
    versions = " and ".join(sorted({f"version {2 if one.unified else 1}" for one in found}))
    text = f"{', '.join(held)} (cgroups, {versions})" if held else "none"
    missing = ", ".join(setting for setting in CONTROLLERS.values() if setting not in held)
    remedy = f"For {missing} without an image: run the gateway as root or with systemd's Delegate=yes."
    return _noted("limits of processes", text, remedy if missing else "")


def private_files(version: int) -> Check:
    """Check whether functions can be denied access to the files of the gateway and of other functions.

    `version` is the version of the kernel's Landlock, or 0 without Landlock.
    """
    remedy = ""
    if not version:
        remedy = 'For resources.files = "private": use a kernel with Landlock (5.13 or later).'
    elif version < SINCE_SCOPE:
        remedy = 'Functions with resources.files = "private" can send signals to the gateway: use Linux 6.12 or later.'
    return _noted("private files", f"Landlock, version {version}" if version else "no Landlock", remedy)


def _container_only(settings: GatewaySettings) -> list[str]:
    """Return the names of the gateway's API keys with which only code in containers may be deployed."""
    try:
        documents = open_documents(settings.state_dir, settings.database)
        file = stored_keys(documents)
        documents.close()
    except (GatewayError, PackageMissing):
        return []
    return [key.name for key in file.keys if key.container_only] if file else []


def containers(settings: GatewaySettings, engine: str | None) -> Check:
    """Check whether functions can run in containers. `engine` is the URL of the engine's socket, if there is one."""
    remedy = ""
    if engine is None:
        remedy = (
            "Functions with an image cannot run. Install docker or podman, and start its service: systemctl start podman.socket,"
            " or podman system service --time=0 URL, with PILOTFLAME_ENGINE=URL for the gateway."
        )
    elif find_spec("aiodocker") is None:
        remedy = "Functions with an image cannot run: pip install aiodocker"
    if remedy and (names := _container_only(settings)):
        remedy += f" With these API keys, nothing else can be deployed: {', '.join(names)}."
    kept = f"{engine}: files, network, processes and all limits are kept apart"
    return _noted("container engine", kept if engine else "none", remedy)
