"""Weights on a disk are read ahead, in the order of first touch, unless they are in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.snapshot.fetching.ranges import wanted_order
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.slices import part_of
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.read_ahead import ReadAhead, in_memory, pieces
from safetensors.torch import save_file

KiB, MiB = 1 << 10, 1 << 20
NAME = "model.safetensors"


@pytest.fixture
def cold(save: Callable[..., tuple[Path, Manifest]]) -> tuple[Path, Manifest]:
    """A snapshot of 24 MiB that is on the disk and not in the page cache."""
    root, manifest = save({f"layer.{index}": torch.full((6 * MiB,), index).byte() for index in range(4)})
    evict(root / NAME)
    if cached_share(root / NAME) > 0:
        pytest.skip("the file system of temporary files is in memory")
    return root, manifest


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached_share(path: Path) -> float:
    """Return the share of the file's pages that are in the page cache (mincore)."""
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        pages = ctypes.create_string_buffer(-(-len(memory) // mmap.PAGESIZE))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), pages) == 0
        return sum(page & 1 for page in pages.raw) / len(pages)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "snapshot-read-ahead"]


def have_ended() -> bool:
    """Wait for the threads that read. Return True if all have ended."""
    for thread in readers():
        thread.join(60)
    return not readers()


def test_an_opened_snapshot_is_read_from_the_disk_though_nothing_touches_it(cold: tuple[Path, Manifest]):
    root, manifest = cold
    snapshot = Snapshot(root, manifest)
    snapshot.open()
    assert have_ended()
    assert cached_share(root / NAME) == 1


def test_what_is_in_memory_is_not_read(cold: tuple[Path, Manifest]):
    root, manifest = cold
    mapping = Mapping(root, manifest)
    assert not in_memory(manifest, mapping.flats)
    mapping.read_ahead()
    assert have_ended()
    assert cached_share(root / NAME) == 1
    mapping.read_ahead()
    assert readers() == []


def test_a_part_that_is_missing_is_noticed(cold: tuple[Path, Manifest]):
    root, manifest = cold
    mapping = Mapping(root, manifest)
    # The kernel reads some MiB around this byte, but not the whole file.
    assert mapping.flats[0][0] > 0
    assert not in_memory(manifest, mapping.flats)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 5 * MiB)])
def test_a_file_that_is_removed_or_cut_meanwhile_ends_the_threads(
    cold: tuple[Path, Manifest], damage: Callable
):
    root, manifest = cold
    damage(root / NAME)
    ReadAhead(root, manifest)
    assert have_ended()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 200), st.randoms())
def test_the_chunks_come_in_the_order_of_first_touch_up_to_the_limit(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit_kib: int, shuffled
):
    root = tmp_path_factory.mktemp("snapshot")
    save_file(
        {f"t{index}": torch.zeros(size * KiB, dtype=torch.uint8) for index, size in enumerate(sizes)},
        root / NAME,
    )
    made = create(root, chunk_bytes=4 * KiB)
    names = [tensor.name for tensor in made.tensors]
    shuffled.shuffle(names)
    manifest = made.model_copy(update={"first_touch": tuple(names)})
    read = [piece.begin // (4 * KiB) for piece in pieces(manifest, limit_kib * KiB)]
    order = wanted_order(manifest)
    assert read == order[: len(read)]
    assert len(read) == len(order) or (len(read) + 1) * 4 * KiB > limit_kib * KiB
    assert sum(piece.end - piece.begin for piece in pieces(manifest, limit_kib * KiB)) <= limit_kib * KiB


def test_of_a_part_only_its_own_bytes_are_read(cold: tuple[Path, Manifest]) -> None:
    root, manifest = cold
    part = part_of(manifest, ["layer.1", "layer.3"], {"*": (0, 1, 2)})
    mapping = Mapping(root, part)
    assert not in_memory(part, mapping.flats)
    ReadAhead(root, part)
    assert have_ended()
    assert in_memory(part, mapping.flats)
    assert not in_memory(manifest, mapping.flats)
    assert cached_share(root / NAME) < 1
