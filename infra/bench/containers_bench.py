"""Containers: their cost at a cold start, the memory they share, and the effect of a container at its limits on a neighbour.

Each pair of figures is measured in turn, on the same machine and with the same engine, and compared by medians.

    python infra/bench/containers_bench.py [--rounds 30] [--weights-mb 256]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from container_gateway import Place, container_gateway, made_image
from control import Control
from percentiles import median, percentile
from report import Report

ROLLING = Path(__file__).resolve().parents[2] / "build" / "bench" / "rolling.json"
MIB = 1 << 20
IDLE_S = 10.0
NEIGHBOUR_S = 4.0
NEIGHBOUR_ROUNDS = 3
WORKERS = 4
PLAIN = """
import os

def build(context):
    return {"table": list(range(1000))}

def handler(event, context):
    return {"pid": os.getpid(), "sum": sum(context.state["table"])}
"""
# Reads every page of its weights, so that all pages count.
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
# Forks up to the limit of processes, then fills the disk, and with `eat` finally exceeds the limit of memory.
HOG = """
import os, time

def handler(event):
    children = []
    try:
        while True:
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


@dataclass(frozen=True)
class Options:
    rounds: int
    weights_mb: int


# -- cold starts


def cold_ms(place: Place, name: str) -> float:
    """One request from zero, from a standby."""
    place.control.wait_for(name, workers=0, standby=True)
    reply = place.control.invoke(name, {})
    if not reply.cold:
        raise RuntimeError(f"{name} was not cold")
    return reply.ms


def zygote(place: Place, report: Report, options: Options) -> None:
    """Cold starts at rung ZYGOTE: in a running container, and in processes."""
    settings = {"scale.idle_timeout_s": 0, "scale.rest": "zygote"}
    names = [
        place.deploy("boxed", PLAIN, **settings, **{"image.name": made_image()}),
        place.deploy("bare", PLAIN, **settings),
    ]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.rounds + 2):
        for name in names if turn % 2 else names[::-1]:
            times[name].append(cold_ms(place, name))
    boxed, bare = (median(times[name][2:]) for name in names)
    report.add("container_zygote_ms", boxed, "ms")
    report.add("process_zygote_ms", bare, "ms")
    report.add("container_zygote_extra_ms", boxed - bare, "ms", "<= 10")
    place.delete("bare")
    paused(place, report, options)
    place.delete("boxed")


def paused(place: Place, report: Report, options: Options) -> None:
    """What pausing the idle container saves, and what waking it costs."""
    place.control.wait_for("boxed", workers=0, standby=True)
    (container,) = place.containers("boxed")
    path = f"/containers/{container['Id']}"
    report.add("idle_container_cpu_ms", _cpu_ms_of_idle(place), "ms")
    report.add("idle_container_pss_mb", pss_mb(place.processes("boxed")), "MB")
    woken, unpaused = [], []
    for _ in range(max(3, options.rounds // 3)):
        place.control.wait_for("boxed", workers=0, standby=True)
        place.client.request("POST", f"{path}/pause")
        begun_s = time.perf_counter()
        place.client.request("POST", f"{path}/unpause")
        unpaused.append((time.perf_counter() - begun_s) * 1e3)
        woken.append(unpaused[-1] + cold_ms(place, "boxed"))
    place.control.wait_for("boxed", workers=0, standby=True)
    place.client.request("POST", f"{path}/pause")
    report.add("paused_container_pss_mb", pss_mb(place.processes("boxed")), "MB")
    place.client.request("POST", f"{path}/unpause")
    report.add("unpause_ms", median(unpaused), "ms")
    report.add("paused_cold_ms", median(woken), "ms")


def _cpu_ms_of_idle(place: Place) -> float:
    """The CPU time that the processes of a container without work use in ten seconds."""

    def used_ms() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in place.processes("boxed")) * 1e3

    before_ms = used_ms()
    time.sleep(IDLE_S)
    return used_ms() - before_ms


def from_nothing(place: Place, report: Report, options: Options) -> None:
    """Cold starts without a container, beside what the engine needs for an empty one."""
    settings = {"scale.idle_timeout_s": 0, "scale.rest": "local", "image.name": made_image()}
    name = place.deploy("away", PLAIN, **settings)
    cold, empty = [], []
    for _ in range(max(5, options.rounds // 3)):
        place.control.wait_for(name, workers=0, standby=False)
        place.wait_no_container(name)
        reply = place.control.invoke(name, {})
        cold.append(reply.ms)
        empty.append(empty_ms(place))
    report.add("engine_empty_ms", median(empty), "ms")
    report.add("container_cold_ms", median(cold), "ms")
    report.add("container_cold_extra_ms", median(cold) - median(empty), "ms", "<= 1000")
    place.delete(name)


def empty_ms(place: Place) -> float:
    """Create and start a container that only writes a byte; until that byte is here."""
    folder = place.root / "empty"
    folder.mkdir(exist_ok=True)
    fifo = folder / "fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    command = ["/dd", "if=/proc/self/comm", "of=/out/fifo", "bs=1", "count=1"]
    mounts = [
        {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}
        for source, target, read_only in (("/bin/dd", "/dd", True), (folder, "/out", False))
    ]
    host = {
        "Mounts": mounts, "NetworkMode": "none", "ReadonlyRootfs": True, "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"], "PidsLimit": 512, "Tmpfs": {"/tmp": "rw,size=67108864"},
        "Ulimits": [{"Name": name, "Soft": 1024, "Hard": 1024} for name in ("nofile", "nproc")],
    }  # fmt: skip
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        begun_s = time.perf_counter()
        body = {"Image": made_image(), "Entrypoint": [], "Cmd": command, "HostConfig": host}
        made = place.client.request("POST", "/containers/create", body)
        place.client.request("POST", f"/containers/{made['Id']}/start")
        if not select.select([reader], [], [], 60)[0]:
            raise RuntimeError("the empty container wrote nothing")
        ms = (time.perf_counter() - begun_s) * 1e3
        # It ends by itself. An engine may fail to kill what is just ending.
        place.client.request("POST", f"/containers/{made['Id']}/wait", missing=True)
        place.client.request("DELETE", f"/containers/{made['Id']}?force=1", missing=True)
        return ms
    finally:
        os.close(reader)


# -- memory


def pss_mb(processes: list[psutil.Process]) -> float:
    """What processes hold together, from the host's smaps_rollup: shared pages count once."""
    total_kb = 0
    for process in processes:
        # A process that has just ended holds nothing.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kb += int(line.split()[1])
    return total_kb / 1024


def shared_weights(place: Place, report: Report, options: Options) -> None:
    """Four workers in one container, and four containers: do they hold the weights once?"""
    folder = _weights(place, options.weights_mb)
    handler = HEAVY.replace("{rows}", str(options.weights_mb * MIB // (4 * 4096)))
    settings = {
        "image.name": made_image(torch=True), "snapshot": str(folder), "scale.max": WORKERS,
        "scale.idle_timeout_s": 3600, "threads": 1,
    }  # fmt: skip
    name = place.deploy("heavy0", handler, **settings)
    _warm(place, name, 1)
    worker_mb, container_mb = pss_mb(place.workers(name)), pss_mb(place.processes(name))
    _warm(place, name, WORKERS)
    workers_mb = pss_mb(place.workers(name))
    place.delete(name)
    names = [place.deploy(f"heavy{number}", handler, **settings) for number in range(1, WORKERS + 1)]
    for each in names:
        _warm(place, each, 1)
    containers_mb = sum(pss_mb(place.processes(each)) for each in names)
    for each in names:
        place.delete(each)
    rows = (
        ("workers", "processes of workers in one container", worker_mb, workers_mb),
        ("containers", "whole containers, one worker each", container_mb, containers_mb),
    )
    for name, what, one_mb, four_mb in rows:
        own_mb = one_mb - options.weights_mb
        allowed_mb = 1.3 * options.weights_mb + WORKERS * own_mb
        report.row(what=what, one_mb=one_mb, own_mb=own_mb, four_mb=four_mb, allowed_mb=allowed_mb)
        report.add(f"four_{name}_pss_ratio", four_mb / allowed_mb, "", "<= 1")


def _weights(place: Place, size_mb: int) -> Path:
    import torch  # noqa: PLC0415  the other parts need it not
    from safetensors.torch import save_file  # noqa: PLC0415

    folder = place.root / "weights"
    folder.mkdir()
    made = torch.randn(size_mb * MIB // (4 * 4096), 4096, generator=torch.Generator().manual_seed(0))
    save_file({"weight": made}, folder / "model.safetensors")
    return folder


def _warm(place: Place, name: str, workers: int) -> None:
    """Start `workers` workers, and call until each has answered. Each answer reads all of the weights."""
    place.control.request("POST", f"/v2/{name}/warmup?workers={workers}", {})
    place.control.wait_for(name, workers=workers)
    seen: set[str] = set()
    deadline_s = time.monotonic() + 60
    while len(seen) < workers:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"only {len(seen)} of {workers} workers of {name} answered")
        with _calls(place.control.url, name, workers) as replies:
            seen |= set(replies)


@contextlib.contextmanager
def _calls(url: str, name: str, count: int) -> Iterator[list[str]]:
    """Make `count` calls at the same time, so that several workers have one each. Yield the ids of the workers."""
    workers: list[str] = []

    def call() -> None:
        control = Control(url)
        workers.append(control.invoke(name, {}).worker)
        control.close()

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield workers


# -- neighbours


def neighbour(place: Place, report: Report, options: Options) -> None:
    """The p99 of a function beside one that is at its limits, and without it, in turn."""
    del options
    image = made_image()
    beside = place.deploy("beside", PLAIN, **{"image.name": image, "scale.idle_timeout_s": 3600})
    limits = {
        "resources.memory_mb": 160, "resources.pids": 64, "resources.tmp_mb": 16, "resources.cpus": 0.5,
        "scale.idle_timeout_s": 3600, "image.name": image,
    }  # fmt: skip
    hog = place.deploy("hog", HOG, **limits)
    quiet: list[float] = []
    loud: list[float] = []
    for _ in range(NEIGHBOUR_ROUNDS):
        quiet += _latencies_ms(place, beside)
        with _hogging(place.control.url, hog) as ends:
            loud += _latencies_ms(place, beside)
        report.row(what="hog", ends=dict(ends))
        if not ends:
            raise RuntimeError("the hog did not come to any limit")
    report.add("neighbour_quiet_p99_ms", percentile(quiet, 0.99), "ms")
    report.add("neighbour_loud_p99_ms", percentile(loud, 0.99), "ms")
    report.add("neighbour_p99_ratio", percentile(loud, 0.99) / percentile(quiet, 0.99), "", "<= 2")
    for name in (beside, hog):
        place.delete(name)


def _latencies_ms(place: Place, name: str) -> list[float]:
    times = []
    ends_s = time.monotonic() + NEIGHBOUR_S
    while time.monotonic() < ends_s:
        times.append(place.control.invoke(name, {}).ms)
    return times


@contextlib.contextmanager
def _hogging(url: str, name: str) -> Iterator[dict[str, int]]:
    """Call the hog all the time. Gives how many calls ended at which limit."""
    stop = threading.Event()
    ends: dict[str, int] = {}

    def call() -> None:
        control, eat = Control(url), False
        while not stop.is_set():
            try:
                control.invoke(name, {"eat": eat})
                end = "processes and disk"
            except RuntimeError as error:
                end = "memory" if "memory" in str(error) else str(error)[:200]
            ends[end] = ends.get(end, 0) + 1
            eat = not eat
        control.close()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join()


# -- all


def restarts(report: Report) -> None:
    """What rolling restarts of the stand-alone image dropped, if infra/bench/rolling.py was run."""
    if not ROLLING.exists():
        report.note("dropped_in_restarts is missing: infra/bench/rolling.py was not run.")
        return
    figures: dict[str, Any] = json.loads(ROLLING.read_text())["figures"]
    report.add("dropped_in_restarts", figures["dropped_in_restarts"], "requests", "<= 0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--weights-mb", type=int, default=256)
    parser.add_argument("--only", default="", help="names of parts, with commas")
    chosen = parser.parse_args()
    options = Options(chosen.rounds, chosen.weights_mb)
    report = Report("bench-containers", packages=("aiodocker", "torch"))
    parts = {"zygote": zygote, "cold": from_nothing, "memory": shared_weights, "neighbour": neighbour}
    wanted = chosen.only.split(",") if chosen.only else list(parts)
    with container_gateway() as place:
        for name in wanted:
            with report.part(name):
                parts[name](place, report, options)
        if left := place.containers():
            report.note(f"{len(left)} containers were there at the end of the parts")
    restarts(report)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
