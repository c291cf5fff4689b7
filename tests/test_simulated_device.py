"""The simulated device refuses what CUDA refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from device_memory import DeviceMemory
from device_tests import DeviceTests
from pilotflame.errors import SnapshotError
from simulated_device import ADDED, SimulatedDevice

MIB = 1 << 20
WAIT_S = 20.0


class TestSimulatedDevice(DeviceTests):
    @pytest.fixture
    def device(self) -> SimulatedDevice:
        return SimulatedDevice(delay_s=0.0005)


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


OTHER = (
    ADDED
    + """
from pilotflame.snapshot.restoring.device.device import find_device
device = find_device("simulated")
held = device.empty(2 << 20)
print("held", flush=True)
sys.stdin.readline()
device.resize(held.untyped_storage(), 1 << 20, copied_to=True)
print("resized", flush=True)
sys.stdin.readline()
"""
)


def test_processes_share_the_capacity_until_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "device"
    monkeypatch.setenv("PILOTFLAME_SIMULATED_DEVICE", f"{folder}:{6 * MIB}")
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        # Each of the two processes has a context of 1 MiB.
        device = SimulatedDevice(capacity_bytes=6 * MIB, folder=folder)
        with pytest.raises(SnapshotError, match=f"which has {2 * MIB} of {6 * MIB} free"):
            device.empty(3 * MIB)
        other.stdin.write("go on\n")
        other.stdin.flush()
        assert other.stdout.readline() == "resized\n"
        held = device.empty(3 * MIB)
        other.kill()
    assert device.empty(2 * MIB).numel() + held.numel() == 5 * MIB


@pytest.fixture
def device() -> SimulatedDevice:
    """A device with one stream."""
    found = SimulatedDevice(delay_s=0.0005)
    del found.streams[1:]
    return found


@pytest.fixture
def resume(device: SimulatedDevice) -> Iterator[Callable[[], None]]:
    """Block the stream of `device` until the test calls the yielded function."""
    held = threading.Event()
    device.streams[0].put(lambda: held.wait(WAIT_S))
    yield held.set
    held.set()


@pytest.mark.parametrize("size_bytes", [0, 1000])
def test_a_copy_to_memory_that_was_given_back_is_a_fault_after_which_every_call_fails(
    device: SimulatedDevice, resume: Callable[[], None], size_bytes: int
) -> None:
    target = device.empty(1000)
    event = device.copy(torch.ones(1000, dtype=torch.uint8), target)
    device.resize(target.untyped_storage(), 0, copied_to=True)
    # The new memory of the tensor does not help: the copy still writes to the freed memory.
    device.resize(target.untyped_storage(), size_bytes, copied_to=True)
    resume()
    for call in (event.wait, event.done, device.finish, device.release, lambda: device.empty(1)):
        with pytest.raises(RuntimeError, match=r"has failed: .*given back"):
            call()


def free(device: SimulatedDevice, memory: list[torch.Tensor], how: str) -> None:
    """Free the only tensor in a list that refers to its memory."""
    if how == "resized":
        for size_bytes in (0, 8):
            device.resize(memory[0].untyped_storage(), size_bytes, copied_to=False)
    memory.clear()


@pytest.mark.parametrize("how", ["resized", "dropped"])
@pytest.mark.parametrize(("recorded", "byte"), [(False, 0x7F), (True, 1)])
def test_freed_memory_is_poison_for_a_stream_that_was_not_recorded(
    device: SimulatedDevice, resume: Callable[[], None], how: str, recorded: bool, byte: int
) -> None:
    (stream,), memory, seen = device.streams, [device.empty(8).fill_(1)], list[list[int]]()
    device.submit(stream, lambda found: seen.append(found.tolist()), memory[0][2:5])
    if recorded:
        device.record(memory[0], stream)
    free(device, memory, how)
    resume()
    device.finish()
    assert seen == [[byte] * 3]


@pytest.mark.parametrize("how", ["resized", "dropped"])
def test_freed_memory_counts_until_the_recorded_streams_have_passed(
    device: SimulatedDevice, resume: Callable[[], None], how: str
) -> None:
    (stream,), memory = device.streams, [device.empty(8)]
    device.record(memory[0], stream)
    device.record(memory[0], stream)
    free(device, memory, how)
    assert device.held_bytes == MIB + 8
    resume()
    device.finish()
    assert device.held_bytes == MIB


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


def test_each_stream_makes_its_copies_in_order(device: SimulatedDevice) -> None:
    target, order = torch.zeros(1, dtype=torch.int64), list[int]()
    for number in range(30):
        device.copy(torch.tensor([number]), target, then=lambda: order.append(int(target[0])))
    device.finish()
    assert order == list(range(30))


def test_reads_of_device_memory_by_the_host_can_be_refused() -> None:
    weight, host = SimulatedDevice().empty(8), torch.ones(8, dtype=torch.uint8)
    with DeviceMemory(weight) as memory:
        for tensor in (weight[2:], weight + 1):
            with pytest.raises(TypeError, match="cannot read device memory"):
                tensor.numpy()
        for mixed in (lambda: weight + host, lambda: torch.cat([host, weight])):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        weight[:] = host
        on_device = host.to(weight.device)
        assert not memory.has(host)
        assert (weight + on_device).cpu().numpy().tolist() == [2] * 8
        host.copy_(weight)
        assert host.numpy().tolist() == [1] * 8
