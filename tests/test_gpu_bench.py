"""infra/bench/gpu.py: copies in turn, and a run on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pilotflame.snapshot.restoring.device.upload import DeviceUpload
from simulated_device import SimulatedDevice

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "infra" / "bench"))

import gpu  # noqa: E402

# Runs every part of the benchmark with few rounds, because the figures of a simulated device mean nothing.
SHORT = f"""
import sys
sys.path.append({str(ROOT / "infra" / "bench")!r})
import gpu
gpu.ROUNDS, gpu.FRESH_ROUNDS, gpu.TURNS = 2, 1, 6
sys.exit(gpu.main())
"""


def test_memory_is_given_back_only_after_the_copy_has_released_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, never, ending, end = list[int](), threading.Event(), threading.local(), DeviceUpload._end

    def ended(upload: DeviceUpload) -> None:
        ending.slab = upload.slab
        end(upload)

    def release(_: SimulatedDevice) -> None:
        # Check only the copy's thread: parking calls `release` too, in another thread.
        if (slab := getattr(ending, "slab", None)) is not None:
            never.wait(0.2)
            sizes.append(slab.untyped_storage().nbytes())

    monkeypatch.setattr(SimulatedDevice, "release", release)
    monkeypatch.setattr(DeviceUpload, "_end", ended)
    case = gpu.Case(tmp_path, 64, "simulated")
    for _ in range(3):
        case.copy_s()
    case.snapshots.park()
    assert len(sizes) == 3
    assert all(sizes)


@pytest.mark.timeout(200)
def test_every_part_runs_on_the_simulated_device() -> None:
    command = [sys.executable, "-c", SHORT, "--device", "simulated", "--gb", "0.02", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=190)
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert done.returncode == 0
    assert found["figures"].keys() == {
        "h2d_share", "h2d_vs_safetensors", "overlap_ratio", "park_ms", "cold_extra_ms", "turns_answered",
        "first_token_ms", "first_token_ratio", "first_token_extra_ms",
    }  # fmt: skip
