"""A model of 6 GB in a cgroup with 2 GiB of memory: gateway, fetcher and workers in it, the weights served outside of it.

    python infra/bench/small_cgroup.py [--quick]

It must be run by root, or where cgroups may be made. It takes 6 GB of the disk for the time of the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkpoint
import numpy as np
from control import Control, Reply
from nginx import start_nginx
from pilotflame.runtime.launching.cgroups import Cgroup, make_cgroup
from pilotflame.runtime.settings.resources import Resources
from pilotflame.snapshot.caching.node import node_tiers
from report import Report
from servers import running

NAME, _PAGE = "whole", 4096
_FUNCTION = Path(__file__).resolve().parent / "functions" / NAME
IDLE_S = 1.0
_JOINING = """
import os, sys
for file in sys.argv[2:sys.argv.index("--")]:
    open(file, "w").write("0")
os.execv(sys.executable, [sys.executable, *sys.argv[sys.argv.index("--") + 1 :]])
"""


@contextmanager
def gateway(group: Cgroup, folder: Path) -> Iterator[Control]:
    """A gateway in the group, with its state and its cache in `folder`."""
    joins = [str(file) for file in group.joins]
    serve = ["-m", "pilotflame.runtime.cli", "serve", "--port", "0", "--json"]
    serve += ["--state-dir", str(folder / "state")]
    command = [sys.executable, "-c", _JOINING, "join", *joins, "--", *serve]
    with running("pilotflame", command, {"PILOTFLAME_CACHE_DIR": str(folder / "cache")}) as server:
        server.wait_line()
        control = Control(server.url)
        yield control
        control.close()


def expected(made: checkpoint.Checkpoint) -> int:
    """The sum of the first 16 bits of every page of the tensors."""
    file = np.memmap(made.path, dtype=np.int16, mode="r")
    step = _PAGE // 2
    return sum(int(file[begin // 2 : end // 2 : step].sum(dtype=np.int64)) for _, begin, end in made.ranges())


def kills(group: Cgroup) -> int:
    """The number of the group's processes that the kernel has killed because memory ran out."""
    assert group.memory_kills is not None
    lines = (line.split() for line in group.memory_kills.read_text().splitlines())
    return next(int(count) for name, count in lines if name == "oom_kill")


def measure(report: Report, shape: checkpoint.Shape, limit_mb: int) -> None:
    """Enters cgroup_kills, and how long the calls took."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=checkpoint.DATA) as name:
        folder = Path(name)
        made = checkpoint.snapshot(shape, folder / "bucket", sparse=True)
        group = make_cgroup("pilotflame-bench-small", Resources(memory_mb=limit_mb))
        assert group is not None
        try:
            with start_nginx(folder / "bucket") as server, gateway(group, folder) as control:
                control.deploy(
                    str(_FUNCTION), snapshot=f"{server.url}/{shape.name}", **{"scale.idle_timeout_s": IDLE_S}
                )
                replies = [_cold(control) for _ in range(3)]
                held: dict[str, int] = {tier.kind: tier.used_bytes() for tier in node_tiers(folder / "cache")}
            found = kills(group)
        finally:
            group.remove()
        right = expected(made)
    if wrong := [reply.body for reply in replies if reply.body != right]:
        raise RuntimeError(f"the answers are {wrong}, {right} expected")
    _enter(report, made.shape, limit_mb, replies, held, found)


def _cold(control: Control) -> Reply:
    control.wait_for(NAME, workers=0)
    return control.invoke(NAME, {})


def _enter(
    report: Report,
    shape: checkpoint.Shape,
    limit_mb: int,
    replies: list[Reply],
    held: dict[str, int],
    found: int,
) -> None:
    report.add("cgroup_kills", found, "", "== 0")
    report.add("cgroup_limit_mb", limit_mb, "MiB")
    report.add("cgroup_model_gb", shape.data_bytes / 1e9, "GB")
    report.add("cgroup_fetched_and_answered_s", replies[0].ms / 1e3, "s")
    report.add("cgroup_answered_from_disk_s", min(reply.ms for reply in replies[1:]) / 1e3, "s")
    report.add(
        "cgroup_answered_from_disk_gb_s",
        shape.data_bytes / 1e6 / min(reply.ms for reply in replies[1:]),
        "GB/s",
    )
    for kind, size_bytes in held.items():
        report.add(f"cgroup_held_{kind}_gb", size_bytes / 1e9, "GB")
    report.add("cgroup_cold", sum(reply.cold for reply in replies), "", "== 3")


def main() -> int:
    parser = argparse.ArgumentParser(description="A model that is larger than the memory of the cgroup.")
    parser.add_argument("--quick", action="store_true", help="1.1 GB in 768 MiB")
    arguments = parser.parse_args()
    report = Report("bench-snapshot-cgroup", packages=("torch",))
    shape, limit_mb = (checkpoint.FULL, 768) if arguments.quick else (checkpoint.GIANT, 2048)
    measure(report, shape, limit_mb)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
