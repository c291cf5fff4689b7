"""The simulated device refuses what CUDA refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.restoring.device.simulated import SimulatedDevice

MIB = 1 << 20


def test_memory_is_limited_with_the_context_and_free_again_when_no_tensor_has_it() -> None:
    device = SimulatedDevice(capacity_bytes=4 * MIB, context_bytes=MIB)
    first, second = device.empty(MIB), device.empty(MIB)
    assert device.held_bytes == 3 * MIB
    with pytest.raises(
        SnapshotError, match=f"need {2 * MIB} bytes on simulated, which has {MIB} of {4 * MIB} free"
    ):
        device.empty(2 * MIB)
    view = first[:1]
    del first, second
    assert device.held_bytes == 2 * MIB
    device.resize(view.untyped_storage(), 0, copied_to=True)
    assert device.held_bytes == MIB
    with pytest.raises(SnapshotError, match="has 3145728 of 4194304 free"):
        device.resize(view.untyped_storage(), 4 * MIB, copied_to=True)
    device.resize(view.untyped_storage(), 3 * MIB, copied_to=True)
    assert int(view[0]) == 0x7F


OTHER = """
import sys
from pilotflame.snapshot.restoring.device.device import find_device
device = find_device("simulated")
held = device.empty(2 << 20)
print("held", flush=True)
sys.stdin.readline()
device.resize(held.untyped_storage(), 1 << 20, copied_to=True)
print("resized", flush=True)
sys.stdin.readline()
"""


def test_processes_share_the_capacity_until_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "device"
    monkeypatch.setenv("PILOTFLAME_SIMULATED_DEVICE", f"{folder}:{6 * MIB}")
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        # Two contexts of 1 MiB.
        device = SimulatedDevice(capacity_bytes=6 * MIB, folder=folder)
        with pytest.raises(SnapshotError, match=f"which has {2 * MIB} of {6 * MIB} free"):
            device.empty(3 * MIB)
        other.stdin.write("go on\n")
        other.stdin.flush()
        assert other.stdout.readline() == "resized\n"
        held = device.empty(3 * MIB)
        other.kill()
    assert device.empty(2 * MIB).numel() + held.numel() == 5 * MIB


def test_a_copy_to_memory_that_was_given_back_is_a_fault_after_which_every_call_fails() -> None:
    device = SimulatedDevice(delay_s=0.05)
    target = device.empty(1000)
    event = device.copy(torch.ones(1000, dtype=torch.uint8), target)
    device.resize(target.untyped_storage(), 0, copied_to=True)
    for call in (event.wait, event.done, device.finish, device.release, lambda: device.empty(1)):
        with pytest.raises(RuntimeError, match=r"has failed: .*given back"):
            call()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_after_the_first_use_cannot_use_it() -> None:
    device = SimulatedDevice()
    device.empty(1)
    if not (pid := os.fork()):
        try:
            device.empty(1)
        except RuntimeError as error:
            os._exit(7 if "was forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("call", ["empty", "buffer", "release", "finish"])
def test_what_a_capture_does_not_allow_is_an_error_and_spoils_the_graph(call: str) -> None:
    device, errors = SimulatedDevice(), list[RuntimeError]()
    arguments = (1,) if call in {"empty", "buffer"} else ()

    def run() -> None:
        try:
            getattr(device, call)(*arguments)
        except RuntimeError as error:
            errors.append(error)

    def captured() -> None:
        with device.capture():
            thread = threading.Thread(target=run, name="other")
            thread.start()
            thread.join()

    with pytest.raises(RuntimeError, match="The capture failed: thread other"):
        captured()
    assert errors
    with device.capture():
        device.copy(torch.ones(1), torch.zeros(1))


def test_pinning_can_fail() -> None:
    device = SimulatedDevice()
    device.pins_left = 1
    device.buffer(8)
    with pytest.raises(RuntimeError, match="cannot pin"):
        device.buffer(8)


def test_each_stream_makes_its_copies_in_order() -> None:
    device, target = SimulatedDevice(delay_s=0.0005), torch.zeros(1, dtype=torch.int64)
    order = list[int]()
    del device._streams[1:]
    for number in range(30):
        device.copy(torch.tensor([number]), target, then=lambda: order.append(int(target[0])))
    device.finish()
    assert order == list(range(30))
