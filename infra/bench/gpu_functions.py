"""Functions with their weights on a device, in a real gateway: from zero, parked and woken, and two that take turns.

For `make bench-gpu`. The caller's time stands beside what the copy of the weights takes at the ceiling of the bus.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoint import Shape
from control import Control, Reply
from gpu_case import LLAMA_3B, LLAMA_8B, LLAMA_SMALL, ROUNDS, GpuBench
from llama import next_token
from percentiles import median
from servers import start_pilotflame

_HERE = Path(__file__).resolve().parent
_ON_DISK = _HERE.parents[1] / "build" / "bench" / "bench-gpu-disk"
_WARM = 3
TOKEN = 7
_TURNS = 100
_SIMULATED_MB = 81_920
_CONTEXT_MB = 2048
"""For the context and for what the forward pass needs."""


@dataclass(frozen=True)
class Model:
    """A llama with its weights in `folder`. `right` is its answer, `copy_ms` the time of a copy at the ceiling."""

    folder: Path
    shape: Shape
    size_bytes: int
    right: int
    copy_ms: float

    @property
    def needed_mb(self) -> int:
        return int(1.1 * self.size_bytes / (1 << 20)) + _CONTEXT_MB


@contextmanager
def made(bench: GpuBench, shape: Shape, folder: Path) -> Iterator[Model]:
    """Make a model, which answers here before functions have to answer the same."""
    with bench.llama(shape if bench.cuda else LLAMA_SMALL, folder) as case:
        case.seconds()
        right = next_token(case.module, TOKEN)
        case.snapshots.park()
        copy_ms = case.bytes * bench.ceiling_s_per_byte * 1e3
        yield Model(folder, shape if bench.cuda else LLAMA_SMALL, case.bytes, right, copy_ms)


def from_memory(bench: GpuBench) -> None:
    """Measure functions of a model of 8 billion weights that lie in memory."""
    with made(bench, LLAMA_8B, bench.folder / "llama") as model:
        functions = GpuFunctions(bench, model)
        for measure in (functions.from_zero, functions.parked, functions.in_turns):
            with bench.report.part(measure.__name__):
                measure()


def from_disk(bench: GpuBench) -> None:
    """Enters cold_3b_disk_s: from the start of a process to the first token, with an empty page cache.

    The row beside it has the other clock: from an HTTP request to the answer of a function at zero.
    """
    with made(bench, LLAMA_3B, _ON_DISK) as model:
        functions = GpuFunctions(bench, model)
        process_s = [functions.fresh_process_s() for _ in range(ROUNDS)]
        http_ms = functions.from_zero_ms(drop=True)
    bench.report.row(part="cold, from disk", process_s=median(process_s), http_s=median(http_ms) / 1e3)
    bench.held("cold_3b_disk_s", median(process_s), "s", "<= 3")


class GpuFunctions:
    """Measures functions of one model on one device."""

    def __init__(self, bench: GpuBench, model: Model) -> None:
        self._bench, self._model = bench, model
        total = torch.cuda.get_device_properties(0).total_memory if bench.cuda else _SIMULATED_MB << 20
        self._total_mb = total >> 20

    def from_zero(self) -> None:
        """Enters cold_8b_extra_ms."""
        extra_ms = median(self.from_zero_ms()[1:]) - self._model.copy_ms
        self._bench.held("cold_8b_extra_ms", extra_ms, "ms beyond the copy", "<= 150")

    def from_zero_ms(self, *, drop: bool = False) -> list[float]:
        """Return the times of cold requests, and enter their phases. A standby has made the context. `drop` the page cache."""
        cold_ms = list[float]()
        with self._deployed({"cold": self._model.needed_mb}, {"scale.idle_timeout_s": 0.4}) as control:
            for number in range(1 + ROUNDS):
                control.wait_for("cold", workers=0, standby=True)
                if drop:
                    self._bench.drop_page_cache(self._model.folder)
                cold = self._call(control, "cold", cold=True)
                warm_ms = median([self._call(control, "cold").ms for _ in range(_WARM)])
                cold_ms.append(cold.ms)
                self._bench.report.row(
                    part="function from zero", model=self._model.shape.name, round=number,
                    copy_ms=self._model.copy_ms, warm_ms=warm_ms, cold_ms=cold.ms, **cold.phases_ms,
                )  # fmt: skip
        return cold_ms

    def fresh_process_s(self) -> float:
        """Return the time from the start of a process that reads the weights from the disk to its first answer."""
        with tempfile.TemporaryDirectory(prefix="pilotflame-gpu-") as name:
            self._write_handler(Path(name))
            self._bench.drop_page_cache(self._model.folder)
            command = [sys.executable, f"{name}/handler.py", str(self._model.folder)]
            started_s = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                token = process.stdout.readline()
                took_s = time.perf_counter() - started_s
        self._check(int(token), "the fresh process")
        return took_s

    def parked(self) -> None:
        """Enters wake_function_extra_ms: the first call of a parked worker."""
        wake_ms = list[float]()
        settings = {"scale.idle_timeout_s": 1000, "scale.park_after_s": 0.2}
        with self._deployed({"parks": self._model.needed_mb}, settings) as control:
            self._call(control, "parks", cold=True)
            for _ in range(10 * ROUNDS):
                parked = control.wait_for("parks", workers=0)["workers"]["parked"]
                if parked != 1:
                    raise RuntimeError(f"{parked} workers are parked, not 1")
                wake_ms.append(self._call(control, "parks").ms)
        extra_ms = median(wake_ms) - self._model.copy_ms
        self._bench.held("wake_function_extra_ms", extra_ms, "ms beyond the copy", "<= 100")

    def in_turns(self) -> None:
        """Enters alternations: calls of two functions in turn that do not fit together. Each is answered."""
        settings = {"scale.idle_timeout_s": 1000, "scale.max": 1}
        memory_mb = int(0.6 * self._total_mb)
        with self._filled(), self._deployed({"one": memory_mb, "two": memory_mb}, settings) as control:
            took_ms = [self._call(control, ("one", "two")[turn % 2]).ms for turn in range(_TURNS)]
        self._bench.report.row(part="in turns", turn_ms=median(took_ms), copy_ms=self._model.copy_ms)
        self._bench.report.add("alternations", len(took_ms), "without an error", f"== {_TURNS}")

    @contextmanager
    def _deployed(self, memory_mb: dict[str, int], settings: Mapping[str, float]) -> Iterator[Control]:
        """Run a gateway with a function for each name. A function may use `memory_mb[name]` MB of the device."""
        gpus = None if self._bench.cuda else {"PILOTFLAME_GPUS": f"0:{self._total_mb}"}
        with tempfile.TemporaryDirectory(prefix="pilotflame-gpu-") as name, start_pilotflame(gpus) as server:
            self._write_handler(Path(name))
            control = Control(server.url)
            try:
                for function, most_mb in memory_mb.items():
                    needs = {"resources.gpus": 1, "resources.gpu_memory_mb": most_mb}
                    snapshot = str(self._model.folder)
                    control.deploy(name, name=function, snapshot=snapshot, **needs, **settings)
                yield control
            finally:
                control.close()

    def _write_handler(self, folder: Path) -> None:
        for source, target in {"gpu_handler.py": "handler.py", "checkpoint.py": "", "llama.py": ""}.items():
            shutil.copyfile(_HERE / source, folder / (target or source))
        given = {"shape": vars(self._model.shape), "device": self._bench.name, "token": TOKEN}
        (folder / "model.json").write_text(json.dumps(given))

    @contextmanager
    def _filled(self) -> Iterator[None]:
        """Leaves so much of the device's memory that the weights of two functions do not fit in."""
        if not self._bench.cuda:
            yield
            return
        left = int(1.6 * (self._model.needed_mb << 20))
        filled = torch.empty(max(0, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device="cuda")
        try:
            yield
        finally:
            del filled
            torch.cuda.empty_cache()

    def _call(self, control: Control, name: str, *, cold: bool | None = None) -> Reply:
        reply = control.invoke(name, {"token": TOKEN})
        self._check(reply.body["token"], name)
        if cold is not None and reply.cold != cold:
            raise RuntimeError(f"{name}: the request was to be {'cold' if cold else 'warm'}")
        return reply

    def _check(self, token: int, name: str) -> None:
        if token != self._model.right:
            raise RuntimeError(f"{name} answers {token}, not {self._model.right}")
