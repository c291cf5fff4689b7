"""What all parts of `make bench-gpu` use: the device, its ceiling, and modules whose weights lie in files in memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from checkpoint import Shape
from llama import skeleton
from memory_folder import memory_folder
from percentiles import median
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.restoring.device.device import find_device
from report import Report
from torch import nn

MB, GB = 10**6, 10**9
ROUNDS = 3
LLAMA_8B = Shape("llama-8b", hidden=4096, intermediate=14_336, layers=32, kv_share=4, vocabulary=128_256)
# With the bytes of one that has twice the vocabulary and ties its embeddings.
LLAMA_3B = Shape("llama-3b", hidden=3072, intermediate=8192, layers=28, kv_share=4, vocabulary=64_128)
LLAMA_SMALL = Shape("llama-40mb", hidden=256, intermediate=704, layers=6, vocabulary=8000)
# A prime number of weights: no two rows of a matrix are equal, and no two pieces of a file.
_BLOCK = 2 * 33_554_393
_TIMEOUT_S = 600.0


def write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Manifest:
    """Write bf16 tensors of random finite numbers as one safetensors file, a block at a time, with its manifest."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 256)
    # Small numbers: a deep model of larger ones answers with infinities.
    block = (torch.randn(_BLOCK // 2) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().data
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, _BLOCK):
            file.write(block[: min(_BLOCK, at - begin)])
    manifest = create(folder)
    manifest.write(folder / MANIFEST_NAME)
    return manifest


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
    """Weights in a folder, and a module that gets them on a device as a worker's module does."""

    def __init__(
        self, folder: Path, module: nn.Module, shapes: dict[str, tuple[int, ...]], device: str
    ) -> None:
        folder.mkdir(parents=True)
        self.path, self.module = folder / "model.safetensors", module
        manifest = write(folder, shapes)
        self.bytes = manifest.total_bytes
        self._snapshot = Snapshot(folder, manifest)
        self._snapshot.restore(module, device=device)
        self.snapshots = Snapshots([self._snapshot])

    def begin(self) -> float:
        """Begin to copy the weights to the device, anew if they are there. Return when, in seconds of the clock."""
        again = bool(self._snapshot.slabs)
        if again:
            # It waits until the copy before has given its buffers back.
            self.snapshots.park()
        started_s = time.perf_counter()
        if again:
            self.snapshots.unpark()
        else:
            self.snapshots.open()
        return started_s

    def seconds(self) -> float:
        """Copy all weights to the device, and return how long it took."""
        started_s = self.begin()
        self.snapshots.wait(_TIMEOUT_S)
        return time.perf_counter() - started_s

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), self.snapshots.gate():
            answer: torch.Tensor = self.module(x).cpu()
        return answer


class GpuBench:
    """One part of the benchmark: its report, the device, and a folder in memory for its files."""

    def __init__(self, report: Report, *, cuda: bool) -> None:
        self.report, self.cuda = report, cuda
        self.name, self.where = ("cuda", "cuda:0") if cuda else ("simulated", "cpu")
        self.folder = memory_folder() / "bench-gpu"

    def held(self, name: str, value: float, unit: str, target: str) -> None:
        """Enter a figure that says nothing where the device is simulated: there it is held to nothing."""
        self.report.add(name, value, unit, target if self.cuda else "")

    @cached_property
    def ceiling_s_per_byte(self) -> float:
        """What a raw copy from pinned memory takes at best. Measure it last: torch keeps pinned memory for later."""
        return 1 / max(self.copy_rate(mib) for mib in (4, 16, 64))

    def copy_rate(self, mib: int, *, pinned: bool = True) -> float:
        """Return bytes a second of copies of `mib` each from four buffers of the host."""
        size = mib << 20
        pin = pinned and self.cuda
        buffers = [torch.ones(size, dtype=torch.uint8, pin_memory=pin) for _ in range(4)]
        target = torch.empty(size, dtype=torch.uint8, device=self.where)
        count = (4 * GB if self.cuda else GB // 4) // size
        took_s = []
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            for number in range(count):
                target.copy_(buffers[number % 4], non_blocking=True)
            self.finish()
            took_s.append(time.perf_counter() - started_s)
        return count * size / median(took_s)

    def finish(self) -> None:
        """Block until the device has done all that was submitted."""
        if self.cuda:
            torch.cuda.synchronize()

    @contextmanager
    def case(
        self, module: nn.Module, shapes: dict[str, tuple[int, ...]], folder: Path | None = None
    ) -> Iterator[Case]:
        """Weights of these shapes in `folder`, by default in memory, until the end of the block."""
        folder = folder or self.folder / "case"
        # As a standby does: the context is not on the clock.
        find_device(self.name)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield Case(folder, module, shapes, self.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def chain(self, total_bytes: int, tensors: int, width: int) -> Iterator[Case]:
        """A module of `tensors` matrices."""
        rows = max(1, total_bytes // tensors // (2 * width))
        shapes: dict[str, tuple[int, ...]] = {f"w{number:05}": (width, rows) for number in range(tensors)}
        with self.case(Chain(shapes), shapes) as case:
            yield case

    @contextmanager
    def llama(self, shape: Shape, folder: Path | None = None) -> Iterator[Case]:
        """A language model of random weights."""
        with self.case(skeleton(shape), dict(shape.tensors()), folder) as case:
            yield case

    def drop_page_cache(self, folder: Path) -> None:
        """Let the files in `folder` be read from the disk again; on a machine of our own, all other files too."""
        os.sync()
        if self.cuda:
            # Only root may write there, and in some sandboxes no user.
            with suppress(OSError):
                Path("/proc/sys/vm/drop_caches").write_text("3")
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
