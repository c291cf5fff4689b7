"""Containers: their cost at a cold start, the memory that they share, and the effect of a container at its limits on a neighbour.

Subjects take turns on the same machine and engine, and medians are compared.

    python infra/bench/containers_bench.py [--rounds 30] [--weights-mb 256] [--only PART ...]
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import process_tree
from container_gateway import ContainerGateway, container_gateway, made_image
from control import Control
from percentiles import median, percentile
from report import Report, parser

MIB = 1 << 20
NEIGHBOUR_S, NEIGHBOUR_ROUNDS = 4.0, 3
WORKERS = 4
PLAIN = """
import os

def build(context):
    return {"table": list(range(1000))}

def handler(event, context):
    return {"pid": os.getpid(), "sum": sum(context.state["table"])}
"""
# The handler reads every page of its weights, so that all pages count.
HEAVY = """
import torch

def build(context):
    with context.snapshot.skeleton():
        net = torch.nn.Linear(4096, {rows}, bias=False)
    context.snapshot.restore(net)
    return net

@torch.inference_mode()
def handler(event, context):
    return float(context.state(torch.ones(4096)).sum())
"""
# This handler forks up to the limit of processes, then fills the disk, and with `eat` finally exceeds the
# limit of memory.
GREEDY = """
import os, time

def handler(event):
    children = []
    try:
        while len(children) < 60:
            pid = os.fork()
            if pid == 0:
                time.sleep(0.5)
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    try:
        with open("/tmp/full", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:
        os.unlink("/tmp/full")
    for pid in children:
        os.waitpid(pid, 0)
    if event["eat"]:
        return len(bytearray(b"x") * (1 << 30))
"""
LIMITS = {"resources.memory_mb": 160, "resources.tmp_mb": 16, "resources.cpus": 0.5}


def from_zygote(at: ContainerGateway, report: Report, rounds: int, _weights_mb: int) -> None:
    """Enter how much longer a cold start from a zygote takes in a running container than in processes."""
    settings = {"scale.idle_timeout_s": 0, "scale.rest": "zygote"}
    names = ["boxed", "bare"]
    at.control.deploy_code("boxed", PLAIN, **settings, **{"image.name": made_image()})
    at.control.deploy_code("bare", PLAIN, **settings)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for name in names if turn % 2 else names[::-1]:
            at.control.wait_for(name, workers=0, standby=True)
            reply = at.control.invoke(name, {})
            if not reply.cold:
                raise RuntimeError(f"{name} was not cold")
            times[name].append(reply.ms)
    # The first two rounds warm up.
    boxed, bare = (median(times[name][2:]) for name in names)
    report.add("container_zygote_extra_ms", boxed - bare, f"ms beyond {bare:.1f} ms", "<= 10")
    for name in names:
        at.delete(name)


def from_nothing(at: ContainerGateway, report: Report, rounds: int, _weights_mb: int) -> None:
    """Enter how much longer a cold start without a container takes than the start of an empty container by
    the engine.
    """
    settings = {"scale.idle_timeout_s": 0, "scale.rest": "local", "image.name": made_image()}
    name = "away"
    at.control.deploy_code(name, PLAIN, **settings)
    cold, empty = [], []
    for _ in range(max(2, rounds // 3)):
        at.control.wait_for(name, workers=0, standby=False)
        at.wait_no_container(name)
        cold.append(at.control.invoke(name, {}).ms)
        empty.append(empty_ms(at))
    extra_ms = median(cold) - median(empty)
    report.add("container_cold_extra_ms", extra_ms, f"ms beyond {median(empty):.0f} ms", "<= 1000")
    at.delete(name)


def empty_ms(at: ContainerGateway) -> float:
    """Create and start a container that only writes a byte. Return the time until that byte has arrived."""
    folder = Path(tempfile.mkdtemp(dir=at.root))
    os.mkfifo(folder / "fifo")
    mounts = [
        {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}
        for source, target, read_only in (("/bin/dd", "/dd", True), (folder, "/out", False))
    ]
    # An engine of a user without privileges cannot set limits above that user's own.
    limits = [{"Name": name, "Soft": 1024, "Hard": 1024} for name in ("nofile", "nproc")]
    host = {"Mounts": mounts, "NetworkMode": "none", "ReadonlyRootfs": True, "Ulimits": limits}
    command = ["/dd", "if=/proc/self/comm", "of=/out/fifo", "bs=1", "count=1"]
    reader = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        begun_s = time.perf_counter()
        body = {"Image": made_image(), "Entrypoint": [], "Cmd": command, "HostConfig": host}
        made = at.ask("POST", "/containers/create", body)
        at.ask("POST", f"/containers/{made['Id']}/start")
        if not select.select([reader], [], [], 60)[0]:
            raise RuntimeError("the empty container wrote nothing")
        ms = (time.perf_counter() - begun_s) * 1e3
        # Wait until the container ends by itself. An engine may fail to kill a container that is ending.
        at.ask("POST", f"/containers/{made['Id']}/wait", missing=True)
        at.ask("DELETE", f"/containers/{made['Id']}?force=1", missing=True)
        return ms
    finally:
        os.close(reader)


def memory(at: ContainerGateway, report: Report, _rounds: int, weights_mb: int) -> None:
    """Enter the memory of four workers in one container, and of four containers, relative to one copy of the
    weights.
    """
    handler = HEAVY.replace("{rows}", str(weights_mb * MIB // (4 * 4096)))
    settings = {
        "image.name": made_image(torch=True), "snapshot": str(_weights(at, weights_mb)), "scale.max": WORKERS,
        "scale.idle_timeout_s": 3600, "threads": 1,
    }  # fmt: skip
    names = [f"heavy{number}" for number in range(WORKERS)]
    for name in names:
        at.control.deploy_code(name, handler, **settings)
    _warm(at, names[0], 1)
    one_worker_mb, one_container_mb = worker_mb(at, names[0]), process_tree.pss_mb(at.processes(names[0]))
    _warm(at, names[0], WORKERS)
    workers_mb = worker_mb(at, names[0])
    at.delete(names[0])
    at.control.deploy_code(names[0], handler, **settings)
    for name in names:
        _warm(at, name, 1)
    containers_mb = sum(process_tree.pss_mb(at.processes(name)) for name in names)
    for name in names:
        at.delete(name)
    pairs = (("workers", one_worker_mb, workers_mb), ("containers", one_container_mb, containers_mb))
    for name, one_mb, four_mb in pairs:
        allowed_mb = 1.3 * weights_mb + WORKERS * (one_mb - weights_mb)
        report.row(what=name, one_mb=one_mb, four_mb=four_mb, allowed_mb=allowed_mb)
        report.add(f"four_{name}_pss_ratio", four_mb / allowed_mb, "", "<= 1")


def worker_mb(at: ContainerGateway, name: str) -> float:
    workers = [process for process in at.processes(name) if process_tree.role(process) == "worker"]
    if not workers:
        raise RuntimeError(f"no process of {name} is a worker")
    return process_tree.pss_mb(workers)


def _weights(at: ContainerGateway, size_mb: int) -> Path:
    # Only this part needs torch.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder = at.root / "weights"
    folder.mkdir()
    made = torch.randn(size_mb * MIB // (4 * 4096), 4096, generator=torch.Generator().manual_seed(0))
    save_file({"weight": made}, folder / "model.safetensors")
    return folder


def _warm(at: ContainerGateway, name: str, workers: int) -> None:
    """Start `workers` workers, and call until each has answered. Each answer reads all of the weights."""
    at.control.request("POST", f"/v2/{name}/warmup?workers={workers}", {})
    at.control.wait_for(name, workers=workers)
    seen: set[str] = set()
    deadline_s = time.monotonic() + 60

    def call(_: int) -> str:
        with contextlib.closing(Control(at.control.url)) as control:
            return control.invoke(name, {}).worker

    while len(seen) < workers:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"only {len(seen)} of {workers} workers of {name} answered")
        with ThreadPoolExecutor(workers) as pool:
            seen.update(pool.map(call, range(workers)))


def neighbour(at: ContainerGateway, report: Report, _rounds: int, _weights_mb: int) -> None:
    """Enter the p99 of a function beside a function that is at its limits, relative to its p99 alone."""
    common = {"image.name": made_image(), "scale.idle_timeout_s": 3600}
    beside, greedy = "beside", "greedy"
    at.control.deploy_code(beside, PLAIN, **common)
    at.control.deploy_code(greedy, GREEDY, **LIMITS, **common)
    alone_ms: list[float] = []
    loaded_ms: list[float] = []
    for _ in range(NEIGHBOUR_ROUNDS):
        alone_ms += _latencies_ms(at, beside)
        with _calling(at.control.url, greedy) as ends:
            loaded_ms += _latencies_ms(at, beside)
        report.row(what="greedy", ends=dict(ends))
        if not ends:
            raise RuntimeError("the greedy function did not come to any limit")
    ratio = percentile(loaded_ms, 0.99) / percentile(alone_ms, 0.99)
    report.add("neighbour_p99_ratio", ratio, f"x {percentile(alone_ms, 0.99):.2f} ms", "<= 2")
    for name in (beside, greedy):
        at.delete(name)


def _latencies_ms(at: ContainerGateway, name: str) -> list[float]:
    times = []
    ends_s = time.monotonic() + NEIGHBOUR_S
    while time.monotonic() < ends_s:
        times.append(at.control.invoke(name, {}).ms)
    return times


@contextlib.contextmanager
def _calling(url: str, name: str) -> Iterator[dict[str, int]]:
    """Call the greedy function during the block. Yield the number of calls that ended at each limit."""
    stop = threading.Event()
    ends: dict[str, int] = {}

    def call() -> None:
        eat = False
        with contextlib.closing(Control(url)) as control:
            while not stop.is_set():
                try:
                    control.invoke(name, {"eat": eat})
                    end = "processes and disk"
                except RuntimeError as error:
                    end = "memory" if "memory" in str(error) else str(error)[:200]
                ends[end] = ends.get(end, 0) + 1
                eat = not eat

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join()


PARTS = {"zygote": from_zygote, "cold": from_nothing, "memory": memory, "neighbour": neighbour}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--weights-mb", type=int, default=256)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = options.parse_args()
    report = Report("bench-containers", packages=("aiodocker", "torch"))
    with container_gateway() as at:
        for name in arguments.only:
            with report.part(name):
                PARTS[name](at, report, arguments.rounds, arguments.weights_mb)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
