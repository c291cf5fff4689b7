"""Adapters are fetched and mapped when they are first opened, once for all threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotChanged, SnapshotError, SourceUnavailable
from pilotflame.snapshot.adapters import Adapters
from pilotflame.snapshot.caching.node import Budgets, node_cache
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import ADAPTERS, Snapshot
from pilotflame.snapshot.sources.folder import FolderSource
from safetensors.torch import save_file


class Fetch:
    """Brings the files into the cache, as the node's fetcher does."""

    def __init__(self, cache: Path, folder: Path) -> None:
        self.names: list[str] = []
        self.fails = 0
        self._cache = node_cache(cache, Budgets(0, 64))
        self._folder = folder
        self._leases: list[object] = []

    def __call__(self, name: str) -> float:
        self.names.append(name)
        if self.fails:
            self.fails -= 1
            raise SourceUnavailable("The source is away.")
        lease = self._cache.open(create(self._folder), FolderSource(self._folder))
        lease.wait(10)
        self._leases.append(lease)
        return 10.0


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    (tmp_path / "style").mkdir()
    save_file({"a": torch.arange(8.0)}, tmp_path / "style" / "adapter_model.safetensors")
    return Fetch(tmp_path / "cache", tmp_path / "style")


def adapters_of(tmp_path: Path, cache: Path | None) -> Adapters:
    folder = tmp_path / "style"
    return Adapters([Snapshot(folder, create(folder), name=f"{ADAPTERS}style", cache=cache)])


def test_the_first_open_fetches_for_all_threads(tmp_path: Path, fetch: Fetch) -> None:
    adapters = adapters_of(tmp_path, tmp_path / "cache")
    adapters.fetch = fetch
    assert (list(adapters), len(adapters), "style" in adapters, "other" in adapters) == (
        ["style"],
        1,
        True,
        False,
    )
    assert [one.name for one in adapters["style"].manifest.tensors] == ["a"]
    assert not fetch.names
    together = threading.Barrier(4)

    def read(_: int) -> list[float]:
        together.wait(5)
        return adapters.open("style").load("*")["a"].tolist()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [list(range(8))] * 4
    assert fetch.names == ["adapters.style"]


def test_a_fetch_that_has_failed_is_tried_again(tmp_path: Path, fetch: Fetch) -> None:
    adapters = adapters_of(tmp_path, tmp_path / "cache")
    adapters.fetch, fetch.fails = fetch, 1
    with pytest.raises(SourceUnavailable):
        adapters.open("style")
    assert adapters.open("style").load("a")["a"].sum() == 28


def test_an_adapter_on_this_node_is_not_fetched(tmp_path: Path, fetch: Fetch) -> None:
    adapters = adapters_of(tmp_path, None)
    adapters.fetch = fetch
    assert adapters.open("style").load("a")["a"].sum() == 28
    assert not fetch.names


def test_an_adapter_that_there_is_not(tmp_path: Path, fetch: Fetch) -> None:
    with pytest.raises(SnapshotError, match=r"no adapter 'other' \(there: style\)"):
        adapters_of(tmp_path, None).open("other")
    with pytest.raises(SnapshotError, match="there are none"):
        _ = Adapters()["other"]


def test_an_open_adapter_whose_file_was_replaced_is_noticed(tmp_path: Path, fetch: Fetch) -> None:
    folder = tmp_path / "style"
    manifest = create(folder)
    made = [Snapshot(folder, manifest, name=f"{ADAPTERS}{name}", versions={}) for name in ("style", "other")]
    adapters = Adapters(made)
    assert adapters.compare
    adapters.open("style")
    adapters.check()
    (tmp_path / "new").write_bytes(bytes(manifest.total_bytes))
    (tmp_path / "new").rename(folder / "adapter_model.safetensors")
    with pytest.raises(SnapshotChanged, match="was replaced"):
        adapters.check()
    assert not fetch.names
