"""When memory is short, idle functions give it back before the kernel kills a process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import live
import pytest
from limited_group import limited_group
from live import gateway_process, until
from pilotflame.runtime.node.measuring.memory_pressure import MemoryLimit, MemoryPressure, find_limit

pytestmark = pytest.mark.asyncio

LIMIT_MB, FUNCTIONS = 450, 20
# Each worker holds 16 MiB from its first call on.
HUNGRY = """
KEPT = []
def handler(event):
    KEPT or KEPT.append(bytearray(b"x") * (16 << 20))
    return len(KEPT[0])
"""


def machine(folder: Path, *, total_mb: int = 1000, available_mb: int = 900) -> Path:
    """Write a /proc folder of a machine with this memory. Return the folder."""
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    amounts = {"MemTotal": total_mb, "MemAvailable": available_mb}
    (proc / "meminfo").write_text("".join(f"{key}:  {mb << 10} kB\n" for key, mb in amounts.items()))
    (proc / "self" / "cgroup").write_text("")
    return proc


async def test_the_smallest_limit_of_all_groups_above_counts(tmp_path: Path):
    proc = machine(tmp_path)
    (proc / "self" / "cgroup").write_text("7:cpu,memory:/a/b\n0::/c\n")
    for folder, name, limit in (
        ("memory/a/b", "memory.limit_in_bytes", str(1 << 63)),
        ("memory/a", "memory.limit_in_bytes", "5000"),
        ("c", "memory.max", "max"),
        (".", "memory.max", "9000"),
    ):
        (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / folder / name).write_text(limit)
    assert find_limit(tmp_path / "groups", proc) == MemoryLimit(tmp_path / "groups/memory/a", 5000, False)
    (proc / "self" / "cgroup").write_text("0::/c\n")
    assert find_limit(tmp_path / "groups", proc) == MemoryLimit(tmp_path / "groups", 9000, True)
    (proc / "self" / "cgroup").unlink()
    assert find_limit(tmp_path / "groups", proc) is None


async def test_memory_is_short_by_what_cannot_be_reclaimed(tmp_path: Path):
    proc, groups = machine(tmp_path, available_mb=250), tmp_path / "groups"
    groups.mkdir()
    pressure = MemoryPressure(lambda: None, groups, proc)
    assert pressure.short_bytes() == 0
    pressure.close()
    (proc / "meminfo").write_text(f"MemTotal: {1000 << 10} kB\nMemAvailable: {100 << 10} kB\n")
    assert pressure.short_bytes() == 200 << 20
    # The kernel can reclaim the page cache of a group, so it is no reason to stop workers.
    (groups / "memory.max").write_text("1000")
    (groups / "memory.stat").write_text("anon 700\nfile 900\nshmem 100\n")
    (proc / "meminfo").write_text("")
    (proc / "self" / "cgroup").write_text("0::/\n")
    pressure = MemoryPressure(lambda: None, groups, proc)
    assert pressure.short_bytes() == 0
    (groups / "memory.stat").write_text("anon 790\nfile 10\nshmem 100\n")
    assert pressure.short_bytes() == 190
    pressure.close()


async def test_a_kernel_that_does_not_report_is_no_error(tmp_path: Path):
    MemoryPressure(lambda: None, tmp_path, machine(tmp_path)).close()


@pytest.fixture
def _processes_in_a_small_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let gateways and all processes that they start share LIMIT_MB of memory. The kernel must kill none of them."""
    with limited_group(LIMIT_MB) as group:
        joined = "".join(f"open({str(file)!r}, 'w').write('0')\n" for file in group.joins)
        monkeypatch.setattr(live, "PROCESS", joined + live.PROCESS)
        yield


@pytest.mark.usefixtures("_processes_in_a_small_group")
async def test_twenty_functions_that_need_more_than_there_is_are_served_and_none_is_killed(state: Path):
    # At this price of waiting, the policy itself would keep every worker. So only the shortage of memory stops workers.
    async with gateway_process(state, price_waiting_s=1e3, rest_mb=10_000) as gateway:
        names = [f"f{number}" for number in range(FUNCTIONS)]
        deploys = [gateway.deploy(HUNGRY, name=name, check=False) for name in names]
        functions = await asyncio.gather(*deploys)
        for _ in range(2):
            for function in functions:
                assert await function.answer() == 16 << 20
                # Limit the pace of the calls: no gateway can help a machine whose memory fills faster than processes end.
                await asyncio.sleep(0.05)

        async def evicted() -> list[str]:
            found = []
            for function in functions:
                response = await gateway.client.get(f"/v1/functions/{function.name}/decisions")
                found += [one for one in response.json()["decisions"] if one["action"] == "evict"]
            return [one["cause"] for one in found]

        await until(evicted, "an eviction")
        assert {*await evicted()} == {"pressure"}
        ready = sum([(await function.status())["workers"]["ready"] for function in functions])
        assert 0 < ready < FUNCTIONS
