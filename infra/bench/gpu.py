"""`make bench-gpu`: weights to a device, beside raw copies and the safetensors loader; parking; functions in a gateway;
the first token of a language model, beside a fresh process.

    python infra/bench/gpu.py [--device cuda|simulated] [--gb N]

Without a CUDA device it runs on the simulated device with 0.1 GB. Then the figures show that the code works, and nothing
about speed, so they have no targets. On a CUDA device the tests of tests/snapshot/restoring/device run too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from control import Control, gateway
from gpu_chain import Chain
from gpu_model import deployed, fresh_s, write_model
from percentiles import median
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.restoring.device.cuda import described
from report import Report, parser
from safetensors.torch import load_file, save_file
from servers import HERE
from simulated_device import ADDED

TESTS = Path(__file__).resolve().parents[2] / "tests"
GB = 10**9
MATRICES, ROUNDS, FRESH_ROUNDS, TURNS = 64, 5, 2, 20
TIMEOUT_S = 600.0
PINNING_S = 2.0
SIMULATED_MB = 16_384
CONTEXT_MB = 2048
"""The memory of a context on the device, and of a forward pass."""


class Case:
    """Weights in files, and a module that gets them on the device as the module of a worker does."""

    def __init__(self, folder: Path, width: int, device: str) -> None:
        self.path, self.module, self.width = folder / "model.safetensors", Chain(width, MATRICES), width
        self.where = "cuda:0" if device == "cuda" else "cpu"
        # Numbers this small keep the activations away from the limits of tanh.
        weights = {
            name: torch.randn(width, width, device=self.where).mul_(0.02).to(torch.bfloat16).cpu()
            for name, _ in self.module.named_buffers()
        }
        save_file(weights, self.path)
        create(folder).write(folder / MANIFEST_NAME)
        manifest = Manifest.read(folder)
        self.bytes = manifest.total_bytes
        self._snapshot = Snapshot(folder, manifest)
        self._snapshot.restore(self.module, device=device)
        self.snapshots = Snapshots([self._snapshot])
        # Do what a standby does: make the context, load the kernels, and pin the files.
        self.snapshots.blank()
        self.answer()
        self.snapshots.pin(lambda: False)

    def begin(self) -> float:
        """Begin to copy the weights to the device. Park them first if they are there. Return when the copy began,
        in seconds of the clock.
        """
        again = bool(self._snapshot.modules.uploads)
        if again:
            self.snapshots.park()
        started_s = time.perf_counter()
        if again:
            self.snapshots.unpark()
        else:
            self.snapshots.open()
        return started_s

    def copy_s(self) -> float:
        """Copy all weights to the device. Return the duration."""
        started_s = self.begin()
        self.snapshots.wait(TIMEOUT_S)
        return time.perf_counter() - started_s

    def answer(self) -> float:
        with self.snapshots.gate():
            return self.module.answer(self.where)

    def finish(self) -> None:
        """Block until the device has executed all that was submitted."""
        if self.where != "cpu":
            torch.cuda.synchronize()

    def raw_s(self) -> float:
        """Return how long raw copies of the same number of bytes take from pinned memory: the ceiling."""
        size, cuda = 16 << 20, self.where != "cpu"
        source = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
        target = torch.empty(size, dtype=torch.uint8, device=self.where)
        started_s = time.perf_counter()
        for _ in range(max(1, self.bytes // size)):
            target.copy_(source, non_blocking=True)
        self.finish()
        return time.perf_counter() - started_s

    def peer_s(self) -> float:
        """Return how long `safetensors.torch.load_file` takes."""
        started_s = time.perf_counter()
        tensors = load_file(self.path, device=self.where)
        self.finish()
        took_s = time.perf_counter() - started_s
        del tensors
        return took_s


class GpuBench:
    """The parts of the benchmark on one device."""

    def __init__(self, report: Report, device: str, folder: Path, gb: float) -> None:
        self._report, self._device, self._folder = report, device, folder
        self._where = "cuda:0" if device == "cuda" else "cpu"
        width = int((gb * GB / MATRICES / 2) ** 0.5) // 64 * 64
        self._case = Case(folder, width, device)

    def copies(self) -> None:
        """Enter the speed of a copy relative to raw copies and to safetensors, and the times of a pass that begins with the copy, and of parking."""
        case = self._case
        case.copy_s()
        right = case.answer()
        ours, passes, parks = list[float](), list[float](), list[float]()
        for _ in range(ROUNDS):
            ours.append(case.copy_s())
            started_s = case.begin()
            self._check(case.answer(), right)
            passes.append(time.perf_counter() - started_s)
            case.snapshots.wait(TIMEOUT_S)
            started_s = time.perf_counter()
            case.snapshots.park()
            parks.append(time.perf_counter() - started_s)
            case.snapshots.unpark()
            self._check(case.answer(), right)
        case.snapshots.park()
        raw_s = median([case.raw_s() for _ in range(ROUNDS)])
        peer_s = median([case.peer_s() for _ in range(ROUNDS)])
        copy_s = median(ours)
        self._enter("h2d_share", raw_s / copy_s, "of raw copies", ">= 0.9")
        self._enter("h2d_vs_safetensors", peer_s / copy_s, "x", ">= 2")
        self._enter("overlap_ratio", median(passes) / copy_s, "of the copy alone", "<= 1.1")
        self._enter("park_ms", median(parks) * 1e3, "ms", "<= 100")
        self._right, self._raw_ms = right, raw_s * 1e3

    def functions(self) -> None:
        """Enter the first call of a function at zero, and alternating calls of two functions that do not fit on the device together."""
        total_mb = (
            torch.cuda.get_device_properties(0).total_memory >> 20 if self._device == "cuda" else SIMULATED_MB
        )
        needed_mb = int(1.1 * self._case.bytes / (1 << 20)) + CONTEXT_MB
        with self._deployed({"cold": needed_mb}, {"scale.idle_timeout_s": 0.4}, total_mb) as control:
            cold_ms = []
            for _ in range(ROUNDS):
                control.wait_for("cold", workers=0, standby=True)
                # Wait until the standby has pinned the files, which it does after its rehearsal.
                time.sleep(PINNING_S)
                reply = control.invoke("cold", {})
                self._check(reply.body, self._right)
                cold_ms.append(reply.ms)
        self._enter("cold_extra_ms", median(cold_ms) - self._raw_ms, "ms beyond raw copies", "<= 150")
        needs = dict.fromkeys(("one", "two"), int(0.6 * total_mb))
        with self._deployed(needs, {"scale.idle_timeout_s": 1000, "scale.max": 1}, total_mb) as control:
            for turn in range(TURNS):
                self._check(control.invoke(("one", "two")[turn % 2], {}).body, self._right)
        self._report.add("turns_answered", TURNS, "", f"== {TURNS}")

    def language_model(self) -> None:
        """Enter the time to the first token of a language model from zero, and how many times longer a fresh process takes."""
        folder = self._folder / "model"
        write_model(folder, self._case.bytes, self._where)
        size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        needs: dict[str, float] = {"scale.idle_timeout_s": 0.4}
        if self._device == "cuda":
            needs |= {
                "resources.gpus": 1,
                "resources.gpu_memory_mb": int(1.2 * size_bytes / (1 << 20)) + CONTEXT_MB,
            }
        cold, warm = list[float](), list[float]()
        with deployed(folder, "words", **needs) as tokens:
            for _ in range(ROUNDS):
                tokens.control.wait_for("words", workers=0, standby=True)
                time.sleep(PINNING_S)
                took_ms, was_cold = tokens.ms()
                if not was_cold:
                    raise RuntimeError("a worker was still there")
                cold.append(took_ms)
                warm.append(tokens.ms()[0])
        fresh_ms = 1e3 * median([fresh_s(folder, self._where.partition(":")[0]) for _ in range(FRESH_ROUNDS)])
        self._enter("first_token_ms", median(cold), f"ms, {size_bytes / GB:.1f} GB", "")
        self._enter("first_token_ratio", fresh_ms / median(cold), "x faster than a fresh process", ">= 20")
        # Leave out the time of a raw copy, because a worker cannot answer before its weights are on the
        # device.
        raw_ms = self._raw_ms * size_bytes / self._case.bytes
        self._enter(
            "first_token_extra_ms",
            median(cold) - median(warm) - raw_ms,
            "ms beyond raw copies and a warm one",
            "<= 150",
        )

    def tests(self) -> None:
        """Enter the exit code of the tests that need a CUDA device."""
        if self._device == "cuda":
            path, file = f"pythonpath={TESTS}", TESTS / "snapshot/restoring/device/test_cuda.py"
            options = ("-q", "-c", os.devnull, "-o", path, "--noconftest", str(file))
            command = [sys.executable, "-m", "pytest", *options]
            self._report.add(
                "cuda_tests_exit_code", subprocess.run(command, check=False).returncode, "", "== 0"
            )

    @contextmanager
    def _deployed(
        self, memory_mb: dict[str, int], settings: dict[str, float], total_mb: int
    ) -> Iterator[Control]:
        """Run a gateway with a function for each name. Each function may use `memory_mb[name]` MB of the
        device.
        """
        gpus = {} if self._device == "cuda" else {"PILOTFLAME_GPUS": f"0:{total_mb}"}
        given = {"width": self._case.width, "matrices": MATRICES, "device": self._device}
        with tempfile.TemporaryDirectory(prefix="pilotflame-gpu-") as name, gateway(gpus) as (_, control):
            source = (HERE / "gpu_chain.py").read_text() + (ADDED if self._device == "simulated" else "")
            (Path(name) / "handler.py").write_text(source)
            (Path(name) / "given.json").write_text(json.dumps(given))
            for function, most_mb in memory_mb.items():
                needs = {"resources.gpus": 1, "resources.gpu_memory_mb": most_mb}
                control.deploy(name, name=function, snapshot=str(self._folder), **needs, **settings)
            yield control

    def _check(self, answer: float, right: float) -> None:
        if abs(answer - right) > 0.01 * abs(right):
            raise RuntimeError(f"the answer is {answer}, not {right}")

    def _enter(self, name: str, value: float, unit: str, target: str) -> None:
        self._report.add(name, value, unit, target if self._device == "cuda" else "")


def main() -> int:
    options = parser(__doc__)
    found = "cuda" if torch.cuda.is_available() else "simulated"
    options.add_argument("--device", choices=["cuda", "simulated"], default=found)
    options.add_argument("--gb", type=float, default=16.0 if found == "cuda" else 0.1)
    arguments = options.parse_args()
    report = Report("bench-gpu", packages=("torch", "safetensors"))
    device = ", ".join(described()) if arguments.device == "cuda" else "simulated device"
    report.note(f"{device}, {arguments.gb} GB of weights")
    with tempfile.TemporaryDirectory(prefix="pilotflame-gpu-", dir="/dev/shm") as folder:
        bench = GpuBench(report, arguments.device, Path(folder), arguments.gb)
        for part in (bench.copies, bench.functions, bench.language_model, bench.tests):
            with report.part(part.__name__):
                part()
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
