"""`make bench-gpu`: weights to a device, beside the device's own ceilings and other loaders.

    python infra/bench/gpu.py [--device cuda|simulated] [--gb N ...] [--rounds N] [--only PART ...]

On a machine without a CUDA device it runs on the simulated device with small models. Then the figures say that the
script and the code work, and nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_peers
import psutil
import torch
from checkpoint import Shape
from gpu_functions import TOKEN, GpuFunctions, Model
from llama import skeleton
from memory_folder import memory_folder, mounted
from percentiles import median
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.device.cuda import CudaDevice
from pilotflame.snapshot.restoring.device.device import Device
from pilotflame.snapshot.restoring.device.parking import park, unpark
from pilotflame.snapshot.restoring.device.simulated import SimulatedDevice
from pilotflame.snapshot.restoring.device.upload import DeviceUpload
from pilotflame.snapshot.restoring.gate import Gate, Uncopied
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, upload
from report import Report
from torch import nn

MB, GB = 10**6, 10**9
TIMEOUT_S = 600.0
LLAMA_8B = Shape("llama-8b", hidden=4096, intermediate=14_336, layers=32, kv_share=4, vocabulary=128_256)
LLAMA_SMALL = Shape("llama-40mb", hidden=256, intermediate=704, layers=6, vocabulary=8000)
_BLOCK = 64 << 20


def write(path: Path, shapes: dict[str, tuple[int, ...]]) -> Manifest:
    """Write bf16 tensors of random finite numbers as one safetensors file, a block at a time, and return its manifest."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 256)
    # Small numbers: a deep model of larger ones answers with infinities.
    block = (torch.randn(_BLOCK // 2) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, _BLOCK):
            file.write(block[: min(_BLOCK, at - begin)])
    return create(path.parent)


class Chain(nn.Module):
    """Matrices that are each read once: a forward pass that only memory bandwidth limits."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = list(shapes)
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = torch.tanh(x @ self.get_buffer(name).reshape(x.shape[-1], -1)[:, : x.shape[-1]])
        return x


class Case:
    """A file of weights in memory, and a module that they fit."""

    def __init__(self, folder: Path, module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        folder.mkdir(parents=True)
        self.path = folder / "model.safetensors"
        self.manifest = write(self.path, shapes)
        self.module, self.bytes = module, self.manifest.total_bytes
        # The zygote has made it.
        self._plan = make_plan(module, self.manifest, device="cuda")

    def begin(self, device: Device) -> DeviceUpload:
        return upload(self._plan, Mapping(self.path.parent, self.manifest), device)

    def seconds(self, device: Device) -> float:
        """Copy all to the device, and return how long it took. The module is as before."""
        started_s = time.perf_counter()
        made = self.begin(device)
        made.wait(TIMEOUT_S)
        took_s = time.perf_counter() - started_s
        made.slab.untyped_storage().resize_(0)
        return took_s


@contextmanager
def chain(folder: Path, total_bytes: int, tensors: int, width: int = 1024) -> Iterator[Case]:
    rows = max(1, total_bytes // tensors // (2 * width))
    shapes: dict[str, tuple[int, ...]] = {f"w{number:05}": (width, rows) for number in range(tensors)}
    try:
        yield Case(folder, Chain(shapes), shapes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _register(begin: int, size: int) -> int:
    """Register memory of the host, which is only read. Return the driver's error, 0 if there is none."""
    portable, read_only = 0x01, 0x08
    return int(torch.cuda.cudart().cudaHostRegister(begin, size, portable | read_only))  # type: ignore[no-untyped-call]


class Bench:
    """One run: the device, and where the files are."""

    def __init__(self, report: Report, name: str, rounds: int) -> None:
        self.report, self.rounds = report, rounds
        self.cuda = name != "simulated"
        self.device: Device = CudaDevice(0) if self.cuda else SimulatedDevice(delay_s=0.0)
        self.where = "cuda:0" if self.cuda else "cpu"
        self.folder = memory_folder() / "bench-gpu"
        self.ceiling_s_per_byte = math.inf

    def _speed(self, name: str, value: float, unit: str, target: str) -> None:
        """Enter a figure that says nothing where the device is simulated: there it is held to nothing."""
        self.report.add(name, value, unit, target if self.cuda else "")

    def ceilings(self) -> None:
        """What the bus can do: from pinned memory by size of copy, from pageable memory, and what pinning costs."""
        total = (4 * GB if self.cuda else GB // 4) // (64 << 20) * (64 << 20)
        target = self.device.empty(64 << 20)
        for mib in (1, 4, 16, 64):
            buffers = [self.device.buffer(mib << 20) for _ in range(4)]
            took_s = median([self._copies(buffers, target, total) for _ in range(self.rounds)])
            self.ceiling_s_per_byte = min(self.ceiling_s_per_byte, took_s / total)
            self.report.row(part="pinned", copy_mib=mib, gb_s=total / took_s / GB)
        pageable = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(4)]
        took_s = median([self._copies(pageable, target, total) for _ in range(self.rounds)])
        self.report.row(part="pageable", copy_mib=16, gb_s=total / took_s / GB)
        started_s = time.perf_counter()
        self.device.buffer(512 << 20)
        self.report.row(part="pin 512 MiB", seconds=time.perf_counter() - started_s)
        if self.cuda:
            self._streams(target, total)
            self._registration()
        self.report.add("ceiling_gb_s", 1 / self.ceiling_s_per_byte / GB, "GB/s")

    def _streams(self, target: torch.Tensor, total: int) -> None:
        """The same copies on two streams: more than one helps only if a device has several engines for them."""
        buffers, size = [self.device.buffer(16 << 20) for _ in range(4)], 16 << 20
        streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        started_s = time.perf_counter()
        for number in range(total // size):
            with torch.cuda.stream(streams[number % 2]):
                target[:size].copy_(buffers[number % 4], non_blocking=True)
        torch.cuda.synchronize()
        took_s = time.perf_counter() - started_s
        self.report.row(part="pinned, two streams", copy_mib=16, gb_s=total / took_s / GB)

    def _registration(self) -> None:
        """What it costs to register mapped files with the driver, which could take the place of pinned buffers."""
        window, count, path = 64 << 20, 32, self.folder / "registered"
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            with path.open("ab") as file:
                file.write(bytes(window))
        for threads in (1, 2, 4):
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            with warnings.catch_warnings(action="ignore"):
                begin = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
            with ThreadPoolExecutor(threads) as pool:
                started_s = time.perf_counter()
                refused = [
                    code
                    for code in pool.map(
                        _register, [begin + at * window for at in range(count)], [window] * count
                    )
                    if code
                ]
                took_s = time.perf_counter() - started_s
            if refused:
                self.report.note(f"the driver does not register mapped files (error {refused[0]})")
            for at in range(count if not refused else 0):
                torch.cuda.cudart().cudaHostUnregister(begin + at * window)  # type: ignore[no-untyped-call]
            self.report.row(part=f"register, {threads} threads", gb_s=window * count / took_s / GB)
        path.unlink()

    def _copies(self, buffers: list[torch.Tensor], target: torch.Tensor, total: int) -> float:
        size = buffers[0].numel()
        started_s = time.perf_counter()
        events = [
            self.device.copy(buffers[number % len(buffers)], target[:size]) for number in range(total // size)
        ]
        for event in events:
            event.wait()
        return time.perf_counter() - started_s

    def dense(self, sizes: list[int]) -> None:
        """Dense models: the first copy of a process, with pinning on the clock, later ones, and other loaders."""
        shares, registered, against = list[float](), list[float](), list[float]()
        before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        for size in sizes:
            with chain(self.folder / "dense", size, max(8, size // (256 * MB)), 4096) as case:
                floor_s = case.bytes * self.ceiling_s_per_byte
                # So that no pinned memory is kept from before.
                self.device.release()
                ours = [case.seconds(self.device) for _ in range(self.rounds + 1)]
                if size == sizes[0]:
                    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before_mb
                    # The slab of the simulated device is memory of the host.
                    self.report.add(
                        "peak_extra_host_mb", peak_mb - (0 if self.cuda else case.bytes / MB), "MB", "<= 1000"
                    )
                shares.append(floor_s / ours[0])
                registered.append(floor_s / median(ours[1:]))
                best_s = self._peers(case)
                against.append(best_s / median(ours[1:]))
                self.report.row(part="dense", gb=case.bytes / GB, first_s=ours[0], later_s=median(ours[1:]), ceiling_s=floor_s, best_peer_s=best_s)  # fmt: skip
        self._speed("h2d_share", min(shares), "of the ceiling", ">= 0.9")
        self._speed("h2d_share_registered", min(registered), "of the ceiling", ">= 0.95")
        self._speed("h2d_vs_best_peer", min(against), "times as fast", ">= 2")

    def _peers(self, case: Case) -> float:
        best_s = math.inf
        for name in gpu_peers.installed():
            try:
                if name == "tensorizer":
                    gpu_peers.write_tensorizer(case.path)
                finish = self.device.finish
                took_s = median(
                    [gpu_peers.seconds(name, case.path, self.where, finish) for _ in range(self.rounds)]
                )
            except Exception as error:  # noqa: BLE001  told, and the others go on
                self.report.note(f"{name} failed: {type(error).__name__}: {str(error)[:200]}")
                continue
            self.report.row(part=f"dense, {name}", gb=case.bytes / GB, seconds=took_s)
            best_s = min(best_s, took_s)
        return best_s

    def many(self) -> None:
        """20,000 small tensors."""
        with chain(self.folder / "many", 2 * GB if self.cuda else 80 * MB, 20_000, 64) as case:
            took_s = median([case.seconds(self.device) for _ in range(self.rounds)])
            self._speed(
                "many_share", case.bytes * self.ceiling_s_per_byte / took_s, "of the ceiling", ">= 0.9"
            )
            self.report.row(part="20,000 tensors", mb=case.bytes / MB, seconds=took_s)

    def overlap(self) -> None:
        """A forward pass that begins with the copy, beside the copy alone."""
        ratios = []
        with chain(
            self.folder / "overlap", 8 * GB if self.cuda else 200 * MB, 64, 4096 if self.cuda else 1024
        ) as case:
            for _ in range(self.rounds + 1):
                alone_s = case.seconds(self.device)
                started_s = time.perf_counter()
                made = case.begin(self.device)
                answer = self._answer(case.module, made)
                ratios.append((time.perf_counter() - started_s) / alone_s)
                made.wait(TIMEOUT_S)
                if not torch.equal(answer, self._answer(case.module)):
                    raise RuntimeError("the answers differ")
        self._speed("overlap_ratio", median(ratios[1:]), "of the copy alone", "<= 1.1")

    def _answer(self, module: nn.Module, made: DeviceUpload | None = None) -> Any:
        width = next(iter(module.buffers())).shape[0]
        x = torch.ones(1, width, dtype=torch.bfloat16, device=self.where)
        with torch.inference_mode():
            if made is None or made.complete:
                return module(x).cpu()
            with Gate(Uncopied(made)):
                return module(x).cpu()

    def parking(self) -> None:
        """Giving the memory back, and the first answer after that."""
        with chain(
            self.folder / "park", 8 * GB if self.cuda else 200 * MB, 64, 4096 if self.cuda else 1024
        ) as case:
            alone_s = median([case.seconds(self.device) for _ in range(self.rounds)])
            before = self._allocated()
            made = case.begin(self.device)
            made.wait(TIMEOUT_S)
            right, held = self._answer(case.module), self._allocated() - before
            extra_ms, freed = list[float](), list[float]()
            for _ in range(100):
                parked = park(case.module, made, [made.slab], TIMEOUT_S)
                freed.append(
                    1 - (self._allocated() - before) / held
                    if self.cuda
                    else parked.freed_bytes / made.layout.size_bytes
                )
                started_s = time.perf_counter()
                made = unpark(parked)
                answer = self._answer(case.module, made)
                extra_ms.append((time.perf_counter() - started_s - alone_s) * 1e3)
                if not torch.equal(answer, right):
                    raise RuntimeError("the answer after waking is another")
            self.report.add("park_freed_share", min(freed), "of the function's device memory", ">= 0.95")
            self._speed("wake_extra_ms", median(extra_ms), "ms beyond the copy", "<= 100")

    def _allocated(self) -> int:
        return torch.cuda.memory_reserved() if self.cuda else 0

    def functions(self) -> None:
        """A language model of random weights in a real gateway, which has to answer as it does here."""
        shape = LLAMA_8B if self.cuda else LLAMA_SMALL
        folder = self.folder / "llama"
        try:
            case = Case(folder, skeleton(shape), dict(shape.tensors()))
            made = case.begin(self.device)
            made.wait(TIMEOUT_S)
            with torch.inference_mode():
                right = int(case.module(torch.tensor([[TOKEN]], device=self.where))[0, -1].argmax())
            made.slab.untyped_storage().resize_(0)
            self.device.release()
            model = Model(folder, shape, case.bytes, right, case.bytes * self.ceiling_s_per_byte * 1e3)
            functions = GpuFunctions(self.report, self._speed, model, self.rounds, cuda=self.cuda)
            for measure in (functions.from_zero, functions.parked, functions.in_turns):
                with self.report.part(measure.__name__):
                    measure()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def fitting(sizes: list[int]) -> list[int]:
    """Return those of `sizes` for which this machine has memory: for the file, and for tensorizer's copy of it."""
    return [size for size in sizes if 2.2 * size < psutil.virtual_memory().available]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how weights get to a device.")
    parser.add_argument(
        "--device",
        choices=["cuda", "simulated"],
        default="cuda" if torch.cuda.is_available() else "simulated",
    )
    parser.add_argument(
        "--gb", type=float, nargs="+", help="sizes of the dense models (default: 16 48; simulated: 0.3)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="parts, such as dense overlap")
    arguments = parser.parse_args()
    report = Report("bench-gpu", packages=("torch", "safetensors", "fastsafetensors", "tensorizer"))
    asked = [int(gb * GB) for gb in arguments.gb or ([16, 48] if arguments.device == "cuda" else [0.3])]
    sizes = fitting(asked)
    if left_out := sorted(set(asked) - set(sizes)):
        told = ", ".join(f"{size / GB:g}" for size in left_out)
        report.note(f"this machine has too little memory for dense models of {told} GB")
    with mounted(int(2.2 * max([*sizes, 10 * GB]))):
        bench = Bench(report, arguments.device, arguments.rounds)
        if not bench.cuda:
            report.note("SIMULATED device: these are copies in the host's memory, and no speed of any GPU.")
        parts: dict[str, Callable[[], None]] = {
            "dense": lambda: bench.dense(sizes), "many": bench.many, "overlap": bench.overlap,
            "parking": bench.parking, "functions": bench.functions,
        }  # fmt: skip
        if not sizes:
            del parts["dense"]
        # The others are told as shares of it.
        with report.part("ceilings"):
            bench.ceilings()
        for name, measure in parts.items():
            if not arguments.only or name in arguments.only:
                with report.part(name):
                    measure()
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
