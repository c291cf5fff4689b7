"""Makes control groups (cgroups): the kernel limits the resources that all processes of a group may use together.

In version 2 there is one tree with all controllers, and processes are only in its leaves. To make groups there, a
gateway needs its own part of the tree, as a systemd service with `Delegate=yes` has. In version 1, each controller has
its own tree. A gateway can make groups below its own group, in each tree where it may write.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....errors import LauncherError
from ...ground.settings.resources import PIDS, Resources

# The setting that each controller of the kernel enforces.
CONTROLLERS = {"memory": "memory_mb", "cpu": "cpus"}
# The controller that counts processes and threads. If the machine has it, each group gets it, with the limit PIDS.
COUNTER = "pids"
# In version 2, the gateway moves itself from its own group into this group, which is below its own group.
GATEWAY_GROUP = "pilotflame-gateway"
MOST_MOVES = 10
CPU_PERIOD_US = 100_000
REMOVE_TIMEOUT_S = 5.0
REMEDY = (
    "Run the gateway as a systemd service with Delegate=yes, or as root; or set image.name, to run the"
    " function in a container; or leave the setting out."
)


@dataclass(frozen=True, slots=True)
class Controller:
    """A controller of the kernel, and the folder below which this process may make groups with the controller."""

    name: str
    folder: Path
    unified: bool
    """True for version 2 of cgroups."""


class Cgroup:
    """A group with the limits of one function. It exists until `remove`."""

    def __init__(self, name: str, controllers: list[Controller]) -> None:
        self._folders = {one.name: one.folder / name for one in controllers}
        memory = next((one for one in controllers if one.name == "memory"), None)
        events = "memory.events" if memory is not None and memory.unified else "memory.oom_control"
        self.memory_kills = self._folders["memory"] / events if memory is not None else None
        """The file in which the kernel counts the processes that it kills when the memory of the group runs out."""

    @property
    def joins(self) -> tuple[Path, ...]:
        """The files into which a process writes its pid to join the group."""
        return tuple({folder / "cgroup.procs" for folder in self._folders.values()})

    def make(self, controllers: list[Controller], limits: Resources) -> None:
        """Make the group and set its limits. Raise OSError if the kernel does not allow this."""
        for one in controllers:
            self._folders[one.name].mkdir(exist_ok=True)
            for file, value in _limit_files(one, limits).items():
                path = self._folders[one.name] / file
                # Set a limit of swap only if its file exists. A kernel that does not account for swap has no such file.
                if "sw" not in file or path.exists():
                    path.write_text(value)

    def remove(self) -> None:
        """Kill the processes that still run in the group, and remove the group. Blocks until they have ended."""
        # Remove the folder with `pids.max` first: `_remove_all` sets the limit to 0, so that the processes cannot fork
        # while they are killed.
        _remove_all(
            sorted(set(self._folders.values()), key=lambda folder: not (folder / "pids.max").exists())
        )


def find_controllers(proc: Path = Path("/proc/self")) -> list[Controller]:
    """Return the controllers with which this process may make groups."""
    mounts = list(_cgroup_mounts(proc / "mountinfo"))
    found: dict[str, Controller] = {}
    for line in _lines(proc / "cgroup"):
        _, names, path = line.split(":", 2)
        for root, mounted, options in mounts:
            unified = options is None
            inside = root in (path, "/") or path.startswith(f"{root}/")
            if not inside or (bool(names) if options is None else not {*names.split(",")} <= {*options}):
                continue
            folder = mounted / os.path.relpath(path, root)
            for one in _usable(folder.resolve(), names, unified=unified):
                found.setdefault(one.name, one)
    return list(found.values())


def make_cgroup(name: str, limits: Resources) -> Cgroup | None:
    """Make and return a group with `limits`; None if `limits` has no limit that a group enforces. Raise LauncherError
    if the group cannot be made.
    """
    wanted = {name for name, setting in CONTROLLERS.items() if getattr(limits, setting) is not None}
    if not wanted:
        return None
    controllers = [one for one in find_controllers() if one.name in wanted or one.name == COUNTER]
    if missing := wanted - {one.name for one in controllers}:
        settings = " and ".join(sorted(f"resources.{CONTROLLERS[name]}" for name in missing))
        message = f"{settings} cannot be held on this machine: the gateway may not make cgroups there."
        raise LauncherError(message, remedy=REMEDY)
    group = Cgroup(name, controllers)
    try:
        for folder in {one.folder for one in controllers if one.unified}:
            _delegate(folder, {one.name for one in controllers if one.folder == folder})
        group.make(controllers, limits)
    except OSError as error:
        group.remove()
        message = f"The cgroup {name} cannot be made: {error.strerror} ({error.filename})."
        raise LauncherError(message, remedy=REMEDY) from error
    return group


def remove_left(prefix: str) -> None:
    """Remove the groups that a killed gateway has left. Their names start with `prefix`."""
    folders = {one.folder: one for one in find_controllers()}
    _remove_all([left for folder in folders for left in folder.glob(f"{prefix}*")])


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text().splitlines()
    return []


def _cgroup_mounts(mountinfo: Path) -> Iterator[tuple[str, Path, list[str] | None]]:
    """Yield the root, the mount point and the controllers of each mounted tree. For version 2, the controllers are
    None.
    """
    for line in _lines(mountinfo):
        fields, _, rest = line.partition(" - ")
        kind, *_, options = rest.split()
        root, place = fields.split()[3:5]
        if kind in ("cgroup", "cgroup2"):
            yield root, Path(place), options.split(",") if kind == "cgroup" else None


def _usable(folder: Path, names: str, *, unified: bool) -> Iterator[Controller]:
    if folder.name == GATEWAY_GROUP:
        folder = folder.parent
    if unified:
        names = " ".join(_lines(folder / "cgroup.controllers"))
    needed = folder / "cgroup.subtree_control" if unified else folder
    if os.access(folder, os.W_OK) and os.access(needed, os.W_OK):
        for name in names.replace(",", " ").split():
            if name in CONTROLLERS or name == COUNTER:
                yield Controller(name, folder, unified)


def _delegate(folder: Path, wanted: set[str]) -> None:
    """Give the controllers to the groups below `folder`. The kernel then allows no process in `folder` itself."""
    control = folder / "cgroup.subtree_control"
    if wanted <= set(control.read_text().split()):
        return
    # Do not move the processes of the root of the tree, which is the only group without the file cgroup.type. Processes
    # may stay in the root, and the kernel's own processes cannot be moved.
    if (folder / "cgroup.type").exists():
        _move_all(folder, folder / GATEWAY_GROUP)
    control.write_text(" ".join(f"+{name}" for name in sorted(wanted)))


def _move_all(folder: Path, own: Path) -> None:
    """Move the processes of a group to `own`, a group below it."""
    own.mkdir(exist_ok=True)
    for _ in range(MOST_MOVES):
        if not (pids := _lines(folder / "cgroup.procs")):
            break
        for pid in pids:
            # The process may have ended meanwhile. The next round moves processes that were forked meanwhile.
            with contextlib.suppress(ProcessLookupError):
                (own / "cgroup.procs").write_text(pid)


def _limit_files(controller: Controller, limits: Resources) -> dict[str, str]:
    """Return the text to write into each file of a group, in the order of the writes."""
    if controller.name == "memory":
        value = str((limits.memory_mb or 0) << 20)
        if controller.unified:
            return {"memory.max": value, "memory.swap.max": "0"}
        return {"memory.limit_in_bytes": value, "memory.memsw.limit_in_bytes": value}
    if controller.name == COUNTER:
        return {"pids.max": str(PIDS)}
    quota = str(max(1000, int((limits.cpus or 0) * CPU_PERIOD_US)))
    if controller.unified:
        return {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
    return {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": quota}


def _remove_all(folders: Sequence[Path]) -> None:
    """Kill all processes of the groups, and remove the groups."""
    until_s = time.monotonic() + REMOVE_TIMEOUT_S
    for folder in folders:
        with contextlib.suppress(OSError):
            (folder / "pids.max").write_text("0")
        while folder.exists() and time.monotonic() < until_s:
            for pid in map(int, _lines(folder / "cgroup.procs")):
                _kill(pid, until_s)
            # Let the kernel finish: a process may stay in the group for a moment after its pidfd has reported the end.
            os.sched_yield()
            with contextlib.suppress(OSError):
                folder.rmdir()


def _kill(pid: int, until_s: float) -> None:
    """Kill a process and wait for its end."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll(max(0.0, until_s - time.monotonic()) * 1000)
    finally:
        os.close(descriptor)
