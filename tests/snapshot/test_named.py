"""Several snapshots of one function: restored together, opened, awaited and recorded, each under its name."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import torch
from fault_server import Faults, FaultServer
from pilotflame.errors import (
    SnapshotChanged,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    SourceUnavailable,
)
from pilotflame.snapshot.caching.node import Budgets, node_cache
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.sources.locate import open_source
from safetensors.torch import save_file
from torch import nn

CHUNK_BYTES = 4096


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.lora_A, self.lora_B = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + self.lora_B(self.lora_A(x)))


@pytest.fixture
def whole(tmp_path: Path) -> Adapted:
    """A module whose weights are in the folders base and style. In style, their names have a prefix."""
    torch.manual_seed(3)
    module = Adapted()
    state = module.state_dict()
    for folder, prefix, lora in (("base", "", False), ("style", "base_model.", True)):
        (tmp_path / folder).mkdir()
        tensors = {prefix + name: tensor for name, tensor in state.items() if ("lora" in name) == lora}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    return module


def snapshot(folder: Path, name: str = "", **how: Path) -> Snapshot:
    manifest = create(folder, chunk_bytes=CHUNK_BYTES)
    return Snapshot(folder, manifest, name=name, versions=None if how else {}, **how)  # type: ignore[arg-type]


def named(folder: Path, **how: Path) -> Snapshots:
    return Snapshots(snapshot(folder / name, name, **how) for name in ("base", "style"))


def restored(snapshots: Snapshots) -> Adapted:
    with snapshots.skeleton():
        module = Adapted()
    snapshots.restore(module, prefixes={"style": "base_model."})
    return module


def test_a_module_is_restored_from_all_of_them_when_they_are_opened(whole: Adapted, tmp_path: Path) -> None:
    snapshots = named(tmp_path)
    module = restored(snapshots)
    x = torch.randn(3, 64)
    snapshots.blank()
    assert module(x).abs().sum() == 0
    snapshots.open()
    assert torch.equal(module(x), whole(x))
    # If the snapshots are open, `restore` restores the weights at once.
    assert torch.equal(restored(snapshots)(x), whole(x))
    assert torch.equal(snapshots["style"].load("*lora_A*")["base_model.lora_A.weight"], whole.lora_A.weight)
    assert not snapshots.arriving
    with snapshots.gate():
        assert torch.equal(module(x), whole(x))


def test_names_that_are_not_there_are_refused(whole: Adapted, tmp_path: Path) -> None:
    snapshots = named(tmp_path)
    for options in ({"prefixes": {"stile": "x."}}, {"ignore": {"stile": ["."]}}):
        with pytest.raises(SnapshotError, match=r"no snapshot 'stile' \(there: base, style\)"):
            snapshots.restore(whole, **options)  # type: ignore[arg-type]
    with pytest.raises(SnapshotMismatch, match="do not fit Adapted") as caught:
        snapshots.restore(whole)
    with pytest.raises(SnapshotMismatch, match=r"^snapshots\.style: The snapshot does not fit Adapted"):
        snapshots["style"].restore(whole)
    assert 'prefixes={"style": "base_model."}' in caught.value.remedy


def test_the_one_that_cannot_be_opened_is_named(whole: Adapted, tmp_path: Path) -> None:
    del whole
    snapshots = named(tmp_path)
    (tmp_path / "style" / "model.safetensors").write_bytes(b"another")
    with pytest.raises(SnapshotChanged, match=r"^snapshots\.style: Shard model\.safetensors"):
        snapshots.open()
    # If there is only one snapshot, the error does not begin with a name.
    only = Snapshots([snapshot(tmp_path / "base")])
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(SnapshotChanged, match=r"^(?!snapshots)"):
        only.open()


def test_the_order_of_first_touch_is_recorded_for_each(whole: Adapted, tmp_path: Path) -> None:
    del whole
    snapshots = named(tmp_path)
    module = restored(snapshots)
    snapshots.open()
    recorded = snapshots.record(lambda: module(torch.zeros(1, 64)))
    base, style = recorded["base"].first_touch, recorded["style"].first_touch
    assert [{*base[:2]}, {*base[2:]}] == [{"first.weight", "first.bias"}, {"second.weight", "second.bias"}]
    assert style == ("base_model.lora_A.weight", "base_model.lora_B.weight")


def test_the_failure_of_one_is_told_while_another_still_arrives(whole: Adapted, tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        server.faults = lambda request: Faults(
            stall_share=float(request.name == "base/model.safetensors"), stall_s=60.0, stall_at=10,
            flip_share=float(request.name == "style/model.safetensors"),
        )  # fmt: skip
        cache = node_cache(tmp_path / "cache", Budgets(memory_mb=0))
        snapshots = named(tmp_path, cache=tmp_path / "cache")
        with contextlib.ExitStack() as leases:
            for name in snapshots:
                source = open_source(f"{server.url}/{name}", {})
                leases.callback(cache.open(snapshots[name].manifest, source).close)
            snapshots.open()
            with pytest.raises(SnapshotCorrupt, match=r"^snapshots\.style: "):
                snapshots.wait(50.0)
            assert snapshots["base"].arriving


def test_one_that_has_arrived_is_used_while_another_has_not(whole: Adapted, tmp_path: Path) -> None:
    with FaultServer(tmp_path) as server:
        server.faults = lambda request: Faults(
            stall_share=float(request.name == "base/model.safetensors"), stall_s=60.0, stall_at=10
        )
        cache = node_cache(tmp_path / "cache", Budgets(memory_mb=0))
        snapshots = named(tmp_path, cache=tmp_path / "cache")
        with contextlib.ExitStack() as leases:
            for name in snapshots:
                source = open_source(f"{server.url}/{name}", {})
                leases.callback(cache.open(snapshots[name].manifest, source).close)
            module = restored(snapshots)
            snapshots.open()
            x = torch.randn(3, 64)
            with snapshots.gate():
                assert torch.equal(module.lora_B(module.lora_A(x)), whole.lora_B(whole.lora_A(x)))
            assert snapshots.arriving
            assert snapshots["base"].arriving
            with pytest.raises(SourceUnavailable, match=r"^snapshots\.base: "):
                snapshots.wait(0.2)
            late = named(tmp_path, cache=tmp_path / "cache")
            module = restored(late)
            late.open(time.monotonic() + 0.2)
            with late.gate(), pytest.raises(SourceUnavailable, match=r"^snapshots\.base: "):
                module.first(x)
