"""A file with other bytes than the manifest describes is not mapped, and a write to a mapped file is noticed."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotChanged, SourceUnavailable
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.compared import ComparedShards
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.gate import Gate, Unlanded
from pilotflame.snapshot.restoring.mapping import Mapping

Save = Callable[..., tuple[Path, Manifest]]


def test_an_unchanged_file_is_mapped(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    mapping = Mapping(root, manifest, ComparedShards(root, manifest, {}))
    assert mapping.flats[0].view(torch.int64)[-4:].tolist() == [0, 1, 2, 3]


def test_another_size_is_noticed_also_where_nothing_is_compared(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    os.truncate(root / "model.safetensors", 20)
    for compared in (ComparedShards(root, manifest, {}), None):
        with pytest.raises(SnapshotChanged, match="20 bytes"):
            Mapping(root, manifest, compared)
    (root / "model.safetensors").unlink()
    with pytest.raises(SnapshotChanged, match="No such file"):
        Mapping(root, manifest)


def test_a_mapping_keeps_a_replaced_file_and_notices_a_write(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    path = root / "model.safetensors"
    mapping = Mapping(root, manifest, ComparedShards(root, manifest, {}))
    kept = path.open("r+b")
    (root / "new").write_bytes(b"other")
    (root / "new").replace(path)
    mapping.check()
    with kept as file:
        file.truncate(20)
    with pytest.raises(SnapshotChanged, match="20 bytes instead of"):
        mapping.check()


def count_open(path: Path) -> int:
    """Return the number of descriptors of this process that have a file open."""
    return sum(
        os.path.samestat(path.stat(), file.stat())
        for file in Path("/proc/self/fd").iterdir()
        if file.exists()
    )


def test_the_files_of_a_mapping_are_closed_with_it(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    mapping = Mapping(root, manifest, ComparedShards(root, manifest, {}))
    flats = mapping.flats
    del mapping
    gc.collect()
    # Only the descriptor of the `mmap` object stays open, because `flats` still use the object.
    assert count_open(root / manifest.shards[0].name) == 1
    assert flats[0].numel() == manifest.total_bytes


@pytest.mark.timeout(10)
def test_a_wait_for_weights_ends_at_the_deadline_of_their_arrival(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    mapping = Mapping(root, manifest, arrival=(arrival := Arrival(manifest)))
    arrival.deadline_s = time.monotonic() + 0.05
    for wait in (
        lambda: mapping.wait(0, 0, 8),
        lambda: arrival.wait(0, 0),
        Gate(Unlanded(mapping, arrival)).wait_for_all,
    ):
        with pytest.raises(SourceUnavailable, match="did not arrive"):
            wait()
