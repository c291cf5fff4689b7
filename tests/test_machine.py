"""A process may use a part of the machine: the smallest limit of memory and of processors counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pilotflame.machine import free_memory_bytes, memory_bytes, processors

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
USABLE = len(os.sched_getaffinity(0))
LIMIT = 64 << 20


def made(root: Path, own: str, **limits: object) -> tuple[Path, Path]:
    """Make files of cgroups; the names of limits have `__` for `/` and `_dot_` for `.`."""
    root.mkdir()
    for name, value in limits.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (root / "own").write_text(own)
    return root, root / "own"


@pytest.mark.parametrize(
    ("own", "limits", "found"),
    [
        # A service of systemd, whose slice has the limit.
        ("0::/a.slice/b\n", {"a.slice__b__memory_dot_max": "max", "a.slice__memory_dot_max": LIMIT}, LIMIT),
        (
            "0::/a.slice/b\n",
            {"a.slice__b__memory_dot_max": LIMIT, "a.slice__memory_dot_max": 2 * LIMIT},
            LIMIT,
        ),
        # A container with its own cgroup namespace, and one without, which sees the host's path.
        ("0::/\n", {"memory_dot_max": LIMIT}, LIMIT),
        ("0::/../outside\n", {"memory_dot_max": LIMIT}, LIMIT),
        ("4:memory:/docker/1f\n0::/\n", {"memory__memory_dot_limit_in_bytes": LIMIT}, LIMIT),
        ("4:cpu,memory:/a\n", {"memory__a__memory_dot_limit_in_bytes": LIMIT}, LIMIT),
        # Without a limit, version 1 reports a number near 2**63.
        ("4:memory:/\n", {"memory__memory_dot_limit_in_bytes": 9223372036854771712}, TOTAL),
        ("", {}, TOTAL),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, own: str, limits: dict[str, object], found: int) -> None:
    assert memory_bytes(*made(tmp_path / "cgroups", own, **limits)) == found


@pytest.mark.parametrize(
    ("own", "limits", "found"),
    [
        (
            "0::/a.slice/b\n",
            {"a.slice__b__cpu_dot_max": "max 100000", "a.slice__cpu_dot_max": "50000 100000"},
            0.5,
        ),
        ("0::/\n", {"cpu_dot_max": "25000 50000"}, 0.5),
        (
            "3:cpu,cpuacct:/docker/1f\n0::/\n",
            {"cpu__cpu_dot_cfs_quota_us": 50000, "cpu__cpu_dot_cfs_period_us": 100000},
            0.5,
        ),
        ("3:cpu:/\n", {"cpu__cpu_dot_cfs_quota_us": -1, "cpu__cpu_dot_cfs_period_us": 100000}, USABLE),
        ("", {}, USABLE),
    ],
)
def test_the_smallest_quota_counts(tmp_path: Path, own: str, limits: dict[str, object], found: float) -> None:
    assert processors(*made(tmp_path / "cgroups", own, **limits)) == found


def test_without_cgroups_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path / "nowhere", tmp_path / "none") == TOTAL
    assert 0 < memory_bytes() <= TOTAL
    assert 0 < processors() <= USABLE


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("", {}, 900),
        ("0::/\n", {"memory.max": "max", "memory.current": 100}, 900),
        ("0::/a\n", {"a/memory.max": 800, "a/memory.current": 100}, 700),
        (
            "0::/a\n",
            {"a/memory.max": 800, "a/memory.current": 9, "memory.max": 500, "memory.current": 300},
            200,
        ),
        ("0::/\n", {"memory.max": 1000, "memory.current": 50}, 900),
        # The limit was lowered below the present use.
        ("0::/\n", {"memory.max": 100, "memory.current": 300}, 0),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": 800, "memory/a/memory.usage_in_bytes": 100},
            700,
        ),
    ],
)
def test_free_memory_is_the_least_of_machine_and_groups(
    tmp_path: Path, own: str, files: dict[str, object], found: int
) -> None:
    groups, proc = tmp_path / "groups", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own)
    (proc / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree:  10 kB\nMemAvailable: 900 kB\nHugePages_Total: 0\n"
    )
    for name, value in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        number = value << 10 if isinstance(value, int) else value
        path.write_text(f"{number}\n")
    assert free_memory_bytes(groups, proc) == found << 10


def test_free_memory_is_that_of_this_machine_or_less() -> None:
    assert 0 < free_memory_bytes() <= TOTAL
