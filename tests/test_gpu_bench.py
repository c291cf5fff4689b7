"""infra/bench/gpu*.py and borrowed.py: copies in turn, a run that goes on after a kill, and wheels without an index."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from pilotflame.snapshot.restoring.device.simulated import SimulatedDevice
from pilotflame.snapshot.restoring.device.upload import DeviceUpload
from wheels import write_wheel

ROOT = Path(__file__).parents[1]
BENCH, CUDA_TESTS = "infra/bench", "tests/snapshot/restoring/device/test_cuda.py"
sys.path.append(str(ROOT / BENCH))

import gpu  # noqa: E402
import gpu_case  # noqa: E402
import llama  # noqa: E402
import report  # noqa: E402

FIGURES = {
    "zygote_threads", "zygote_child_answers", "context_mib", "rehearsed_mib", "parked_mib", "cuda_tests_passed", "pin_gb_s",
    "ceiling_gb_s", "register_gb_s", "peak_extra_host_mb", "h2d_share", "h2d_vs_best_peer", "many_share", "overlap_ratio",
    "park_freed_share", "wake_extra_ms", "park_extra_ms", "park_changed_extra_ms", "cold_8b_extra_ms",
    "wake_function_extra_ms", "alternations", "cold_3b_disk_s",
}  # fmt: skip

# The line after which a part is killed, if that is not its first one: here a gateway and its workers run.
LATE = {"functions": "parked …"}


def test_memory_is_given_back_only_after_the_copy_has_released_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, never, ending, end = list[int](), threading.Event(), threading.local(), DeviceUpload._end

    def ended(upload: DeviceUpload) -> None:
        ending.slab = upload.slab
        end(upload)

    def release(_: SimulatedDevice) -> None:
        # Parking releases too, in another thread.
        if (slab := getattr(ending, "slab", None)) is not None:
            never.wait(0.2)
            sizes.append(slab.untyped_storage().nbytes())

    monkeypatch.setattr(SimulatedDevice, "release", release)
    monkeypatch.setattr(DeviceUpload, "_end", ended)
    shapes: dict[str, tuple[int, ...]] = {"a": (64, 64)}
    case = gpu_case.Case(tmp_path / "case", gpu_case.Chain(shapes), shapes, "simulated")
    for _ in range(3):
        case.seconds()
    case.snapshots.park()
    assert len(sizes) == 3
    assert all(sizes)


def test_a_part_is_done_if_its_figures_are_there_and_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_ROOT", tmp_path)
    made = report.Report(gpu.target("cuda", "copy"))
    assert not gpu.is_done("cuda", "copy")
    made.add("h2d_share", 0.5, "of the ceiling", ">= 0.9")
    made.write()
    assert gpu.is_done("cuda", "copy")
    assert not gpu.is_done("simulated", "copy")
    made.fail("overlap failed")
    made.write()
    assert not gpu.is_done("cuda", "copy")
    assert not gpu.finish("cuda")
    found = json.loads((tmp_path / "build/bench/bench-gpu.json").read_text())
    assert found["figures"] == {"h2d_share": 0.5}
    assert found["met"] == {"h2d_share": False}
    assert "overlap failed" in found["failures"]
    assert "parking has no figures yet: run this again" in found["failures"]


def test_a_language_model_answers_each_token_differently(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bench = gpu_case.GpuBench(report.Report("test"), cuda=False)
    with bench.llama(gpu_case.LLAMA_SMALL, tmp_path / "llama") as case:
        case.seconds()
        answers = {llama.next_token(case.module, token) for token in range(8)}
    assert len(answers) > 4


def copied(root: Path) -> Path:
    """Copy the benchmark, and return its folder."""
    shutil.copytree(ROOT / BENCH, root / BENCH)
    (root / CUDA_TESTS).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / CUDA_TESTS, root / CUDA_TESTS)
    return root / BENCH


def test_carried_wheels_are_installed_beside_the_packages_of_the_machine(tmp_path: Path) -> None:
    bench = copied(tmp_path)
    (tmp_path / "build/carried").mkdir(parents=True)
    write_wheel(tmp_path / "build/carried", "lamp", "1.0", "def main(): ...")
    (bench / "gpu.py").write_text("import lamp, torch, sys; print(sys.prefix, torch.__file__, sys.argv[1:])")
    command = [sys.executable, bench / "borrowed.py", "run", "--seconds", "570"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        prefix, torch_file, arguments = done.stdout.strip().split(" ", 2)
        assert prefix == str(tmp_path / "build/borrowed")
        assert Path(torch_file).is_relative_to(sys.prefix)
        assert arguments == "['--seconds', '570']"


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that have `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_in_each_part_goes_on_there(tmp_path: Path) -> None:
    """Without a plugin for timeouts, such as on a borrowed machine: `-c /dev/null --noconftest`."""
    written, environment = tmp_path / "build/bench", {**os.environ, "TEST_MARK": str(tmp_path)}
    command = [sys.executable, copied(tmp_path) / "gpu.py", "--device", "simulated"]
    for part in gpu.PARTS:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            assert LATE.get(part, f"{part}: measured") + "\n" in iter(run.stdout.readline, "")
            # Shortly, because a part can be over in two seconds.
            time.sleep(random.uniform(0.1, 0.5))
            killed = [psutil.Process(run.pid), *psutil.Process(run.pid).children()]
            for process in killed:
                process.kill()
        left = sorted(path.stem for path in written.glob("bench-gpu-*.json"))
        print(f"killed in {part}; there are figures of {left}")
        assert gpu.target("simulated", part) not in left
    done = subprocess.run(command, env=environment, check=False)
    found = json.loads((written / "bench-gpu.json").read_text())
    assert found["failures"] == []
    assert found["figures"].keys() == FIGURES
    assert done.returncode == 0
    assert list(written.glob("bench-gpu-*")) == []
    assert psutil.wait_procs(marked(str(tmp_path)), timeout=20)[1] == []
