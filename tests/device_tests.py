"""Tests of a device that weights are copied to: memory, copies and their order, and memory that is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.restoring.device.copy_event import CopyEvent
from pilotflame.snapshot.restoring.device.device import Device
from pilotflame.snapshot.restoring.device.pinned_shards import map_shared
from torch import Tensor

SIZE_BYTES = 1 << 20


def host_bytes(device: Device, seed: int, size_bytes: int = SIZE_BYTES) -> Tensor:
    """Return random bytes in a buffer of the host."""
    generator = torch.Generator().manual_seed(seed)
    buffer = device.buffer(size_bytes)
    buffer.copy_(torch.randint(256, (size_bytes,), dtype=torch.uint8, generator=generator))
    return buffer


class DeviceTests:
    """Tests of a `Device`. Needs the fixture `device`: a device with at least 64 MiB and less than 1 PiB of
    free memory.
    """

    def test_memory_is_bytes_on_the_device(self, device: Device) -> None:
        memory = device.empty(SIZE_BYTES)
        assert (memory.dtype, memory.numel(), memory.device) == (torch.uint8, SIZE_BYTES, device.device)
        assert device.made_s[0] <= device.made_s[1]

    def test_memory_without_room_is_refused_with_what_there_is(self, device: Device) -> None:
        with pytest.raises(
            SnapshotError, match=rf"need \d+ bytes on {device.name}, which has \d+ of \d+ free"
        ):
            device.empty(1 << 50)
        assert device.empty(8).numel() == 8

    def test_a_copy_has_ended_after_its_event(self, device: Device) -> None:
        source, target = host_bytes(device, 1), device.empty(SIZE_BYTES)
        event = device.copy(source, target)
        event.wait()
        assert event.done()
        assert torch.equal(target.cpu(), source)

    def test_a_buffer_may_be_filled_again_after_the_event(self, device: Device) -> None:
        buffer, targets = device.buffer(SIZE_BYTES), [device.empty(SIZE_BYTES) for _ in range(8)]
        for number, target in enumerate(targets):
            buffer.fill_(number)
            device.copy(buffer, target).wait()
        assert all(bool((target == number).all()) for number, target in enumerate(targets))

    def test_a_pinned_file_is_copied_in_parts(self, device: Device, tmp_path: Path) -> None:
        size_bytes = 4 * SIZE_BYTES
        content = torch.randint(256, (size_bytes,), dtype=torch.uint8)
        (tmp_path / "file").write_bytes(content.numpy().tobytes())
        with (tmp_path / "file").open("rb") as file:
            mapped = map_shared(file.fileno(), size_bytes)
        target = device.empty(size_bytes)
        pinned = device.pin(mapped)
        places = [slice(begin, begin + SIZE_BYTES) for begin in range(0, size_bytes, SIZE_BYTES)]
        *_, last = [device.copy(mapped[place], target[place]) for place in places]
        device.finish()
        assert last.done()
        assert torch.equal(target.cpu(), content)
        if pinned:
            device.unpin(mapped)

    def test_finish_waits_for_all_copies(self, device: Device) -> None:
        sources = [host_bytes(device, seed) for seed in range(10)]
        targets = [device.empty(SIZE_BYTES) for _ in sources]
        events = [device.copy(source, target) for source, target in zip(sources, targets, strict=True)]
        device.finish()
        assert all(event.done() for event in events)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(targets, sources, strict=True))

    def test_an_operation_follows_its_copy_and_earlier_ones(self, device: Device) -> None:
        left, right, joined = device.empty(SIZE_BYTES), device.empty(SIZE_BYTES), device.empty(SIZE_BYTES)
        sources = [host_bytes(device, 1), host_bytes(device, 2)]

        def join() -> None:
            torch.bitwise_xor(left, right, out=joined)

        for _ in range(10):
            joined.zero_()
            first = device.copy(sources[0], left)
            device.copy(sources[1], right, [first], join).wait()
            assert torch.equal(joined.cpu(), sources[0] ^ sources[1])

    def test_an_event_precedes_what_its_thread_submits(self, device: Device) -> None:
        source, target = host_bytes(device, 3), device.empty(SIZE_BYTES)
        event: CopyEvent = device.copy(source, target)
        event.precede()
        assert torch.equal((target + 1).cpu(), source + 1)

    @pytest.mark.parametrize("copied_to", [True, False])
    def test_memory_is_given_back_and_allocated_again(self, device: Device, copied_to: bool) -> None:
        source, target = host_bytes(device, 4), device.empty(SIZE_BYTES)
        device.copy(source, target).wait()
        storage = target.untyped_storage()
        for _ in range(3):
            device.resize(storage, 0, copied_to=copied_to)
            assert storage.nbytes() == 0
            device.release()
            device.resize(storage, SIZE_BYTES, copied_to=copied_to)
            device.copy(source, target).wait()
            assert torch.equal(target.cpu(), source)

    def test_memory_is_not_allocated_again_without_room(self, device: Device) -> None:
        storage = device.empty(8).untyped_storage()
        device.resize(storage, 0, copied_to=True)
        with pytest.raises(SnapshotError, match=f"bytes on {device.name}"):
            device.resize(storage, 1 << 50, copied_to=True)
