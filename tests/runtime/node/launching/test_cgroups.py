"""Which cgroups the gateway may make, according to the kernel's lists, and what it writes into cgroups of version 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.errors import LauncherError
from pilotflame.runtime.ground.settings.resources import PIDS, Resources
from pilotflame.runtime.node.launching import cgroups
from pilotflame.runtime.node.launching.cgroups import Cgroup, Controller, find_controllers

# Each value has the content of /proc/self/cgroup and of /proc/self/mountinfo. PLACE stands for a folder of the test.
SYSTEMD = ("0::/system.slice/pilotflame.service\n", "30 23 0:26 / PLACE/v2 rw - cgroup2 cgroup2 rw\n")
HYBRID = (
    "4:memory:/jobs/a\n3:cpu,cpuacct:/jobs/a\n2:pids:/\n1:name=systemd:/\n0::/\n",
    "31 23 0:28 / PLACE/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:29 / PLACE/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 23 0:30 / PLACE/pids rw - cgroup cgroup rw,pids\n"
    "34 23 0:31 / PLACE/systemd rw - cgroup cgroup rw,name=systemd\n"
    "35 23 0:32 / PLACE/unified rw - cgroup2 cgroup2 rw\n",
)
CONTAINER = (
    "2:memory:/docker/abc\n", "31 23 0:28 /docker/abc PLACE/memory rw - cgroup cgroup rw,memory\n",
)  # fmt: skip


def proc(place: Path, cgroup: str, mountinfo: str) -> Path:
    (folder := place / "proc").mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo.replace("PLACE", str(place)))
    return folder


def unified(folder: Path) -> Path:
    """Make a cgroup of version 2 with one process from ordinary files. Return its folder."""
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (folder / "cgroup.subtree_control").write_text("")
    (folder / "cgroup.procs").write_text("12\n")
    (folder / "cgroup.type").write_text("domain\n")
    return folder


def test_of_version_2_the_gateways_own_part_is_used(tmp_path: Path) -> None:
    own = unified(tmp_path / "v2" / "system.slice" / "pilotflame.service")
    assert set(find_controllers(proc(tmp_path, *SYSTEMD))) == {
        Controller(name, own, unified=True) for name in ("memory", "pids", "cpu")
    }


def test_a_gateway_that_moved_itself_uses_the_part_above(tmp_path: Path) -> None:
    own = unified(tmp_path / "v2" / "x")
    unified(own / cgroups.GATEWAY_GROUP)
    moved = (f"0::/x/{cgroups.GATEWAY_GROUP}\n", SYSTEMD[1])
    assert {one.folder for one in find_controllers(proc(tmp_path, *moved))} == {own}


def test_of_version_1_each_controller_has_a_tree(tmp_path: Path) -> None:
    for folder in ("memory/jobs/a", "cpu/jobs/a", "pids", "systemd", "unified"):
        (tmp_path / folder).mkdir(parents=True)
    assert set(find_controllers(proc(tmp_path, *HYBRID))) == {
        Controller("memory", tmp_path / "memory/jobs/a", unified=False),
        Controller("cpu", tmp_path / "cpu/jobs/a", unified=False),
        Controller("pids", tmp_path / "pids", unified=False),
    }


def test_in_a_container_the_mount_is_the_own_group(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    assert find_controllers(proc(tmp_path, *CONTAINER)) == [
        Controller("memory", tmp_path / "memory", unified=False)
    ]


def test_without_cgroups_there_are_none(tmp_path: Path) -> None:
    assert find_controllers(tmp_path) == []
    assert find_controllers(proc(tmp_path, *SYSTEMD)) == []


def test_a_group_of_version_2_is_made_beside_the_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = unified(tmp_path / "v2" / "system.slice" / "pilotflame.service")
    found = find_controllers(proc(tmp_path, *SYSTEMD))
    monkeypatch.setattr(cgroups, "find_controllers", lambda: found)
    group = cgroups.make_cgroup("one", Resources(memory_mb=64, cpus=0.5))
    assert group is not None
    # In version 2, a cgroup whose children have controllers may have no processes, so the gateway moves itself into a child.
    assert (own / cgroups.GATEWAY_GROUP / "cgroup.procs").read_text() == "12"
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    written = {path.name: path.read_text() for path in (own / "one").iterdir()}
    assert written == {"memory.max": str(64 << 20), "pids.max": str(PIDS), "cpu.max": "50000 100000"}
    assert group.joins == (own / "one" / "cgroup.procs",)
    assert group.memory_kills == own / "one" / "memory.events"


def test_no_process_is_moved_out_of_the_root_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unified(tmp_path / "v2")
    (root / "cgroup.type").unlink()
    found = [Controller("memory", root, unified=True)]
    monkeypatch.setattr(cgroups, "find_controllers", lambda: found)
    assert cgroups.make_cgroup("one", Resources(memory_mb=64)) is not None
    assert (root / "cgroup.subtree_control").read_text() == "+memory"
    assert not (root / cgroups.GATEWAY_GROUP).exists()


def test_no_group_is_made_without_a_limit() -> None:
    assert cgroups.make_cgroup("none", Resources(tmp_mb=4)) is None


def test_a_group_that_the_kernel_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").write_text("a file")
    refused = [Controller("memory", tmp_path / "memory", unified=False)]
    monkeypatch.setattr(cgroups, "find_controllers", lambda: refused)
    with pytest.raises(LauncherError, match="The cgroup one cannot be made: Not a directory"):
        cgroups.make_cgroup("one", Resources(memory_mb=64))
    Cgroup("one", refused).remove()
