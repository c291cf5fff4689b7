"""A file that is not the verified one is never mapped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotChanged, SourceUnavailable
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.gate import Gate, Unlanded
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.source import ObjectInfo

Save = Callable[..., tuple[Path, Manifest]]


def verified_files(root: Path, manifest: Manifest) -> list[ObjectInfo]:
    return [FolderSource(root).stat(shard.name) for shard in manifest.shards]


def test_an_unchanged_file_is_mapped(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    mapping = Mapping(root, manifest, verified_files(root, manifest))
    assert mapping.flats[0].view(torch.int64)[-4:].tolist() == [0, 1, 2, 3]


def test_a_file_written_to_is_noticed(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    verified = verified_files(root, manifest)
    os.utime(root / "model.safetensors", ns=(1, 1))
    with pytest.raises(SnapshotChanged, match="written to"):
        Mapping(root, manifest, verified)


def test_a_replaced_file_is_noticed(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    path = root / "model.safetensors"
    verified = verified_files(root, manifest)
    (root / "new").write_bytes(path.read_bytes())
    os.utime(root / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    (root / "new").replace(path)
    with pytest.raises(SnapshotChanged, match="replaced"):
        Mapping(root, manifest, verified)


def test_another_size_is_noticed_with_and_without_a_fingerprint(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    verified = verified_files(root, manifest)
    os.truncate(root / "model.safetensors", 20)
    for expected in (verified, None):
        with pytest.raises(SnapshotChanged, match="20 bytes"):
            Mapping(root, manifest, expected)
    (root / "model.safetensors").unlink()
    with pytest.raises(SnapshotChanged, match="No such file"):
        Mapping(root, manifest)


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


def test_a_fingerprint_of_something_else_is_refused(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4)})
    with pytest.raises(SnapshotChanged, match="0 files"):
        Mapping(root, manifest, ())
