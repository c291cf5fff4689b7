"""A module runs while its weights arrive: an operation waits for its own bytes only, and the answer equals that of the whole model."""

from __future__ import annotations

import copy
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pilotflame.errors import FetchFailed, SourceUnavailable
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.gate import Gate, Unlanded
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, restore
from pilotflame.snapshot.restoring.touch import record_first_touch
from pilotflame.snapshot.restoring.views import views
from safetensors.torch import save_file
from torch import nn

Save = Callable[..., tuple[Path, Manifest]]
CHUNK_BYTES = 4096


class Tied(nn.Module):
    """An embedding that is also the head, two layers that run in the reverse order of their names, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 64)
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.a(torch.relu(self.b(self.table(tokens))))
        # Use a weight outside of the module that owns it.
        return nn.functional.linear(hidden, self.table.weight)


class Arriving:
    """A snapshot whose chunks land when the test lands them, or when a thread waits for them."""

    def __init__(self, complete: Path, root: Path, manifest: Manifest) -> None:
        self.arrival = Arrival(manifest)
        self.demanded: list[tuple[int, int]] = []
        self._threads: list[threading.Thread] = []
        self._manifest, self._complete = manifest, complete
        self._descriptor = os.open(root / "model.safetensors", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._descriptor, manifest.total_bytes)
        self.mapping = Mapping(root, manifest)

    def land(self, chunk: int) -> None:
        begin = chunk * CHUNK_BYTES
        data = (self._complete / "model.safetensors").read_bytes()[begin : begin + CHUNK_BYTES]
        os.pwrite(self._descriptor, data, begin)
        self.arrival.land(chunk)

    def on_demand(self, first: int, last: int) -> None:
        self.demanded.append((first, last))
        self._threads.append(
            threading.Thread(target=lambda: [self.land(chunk) for chunk in range(first, last + 1)])
        )
        self._threads[-1].start()

    def close(self) -> None:
        for thread in self._threads:
            thread.join(20)
        os.close(self._descriptor)


@contextmanager
def arriving(save: Save, module: nn.Module) -> Iterator[Arriving]:
    root, manifest = save(dict(module.state_dict()), chunk_bytes=CHUNK_BYTES)
    (root / "arriving").mkdir()
    found = Arriving(root, root / "arriving", manifest)
    try:
        yield found
    finally:
        found.close()


def blank(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_each_operation_waits_for_its_own_bytes_and_no_others(save: Save) -> None:
    whole = Tied().eval()
    tokens = torch.tensor([[3, 200, 3]])
    with arriving(save, whole) as found:
        module = blank(Tied)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        found.arrival.on_demand(found.on_demand)
        with torch.inference_mode(), Gate(Unlanded(found.mapping, found.arrival)):
            answer = module(tokens)
        assert torch.equal(answer, whole(tokens))
        names = {tensor.name: tensor for tensor in found.mapping.manifest.tensors}
        unused = names["unused.weight"]
        middle = (unused.offset_bytes + unused.size_bytes // 2) // CHUNK_BYTES
        # No operation needed the tensor, so no wait requested its chunks.
        assert not found.arrival.landed(middle)
        # The first wait was for a chunk with a row of the table, and not for the whole table.
        table = names["table.weight"]
        row = (table.offset_bytes + 3 * 64 * 4) // CHUNK_BYTES
        assert found.demanded[0] == (row, row)
        rest = [chunk for chunk in range(found.arrival.count) if not found.arrival.landed(chunk)]
        for chunk in rest:
            found.land(chunk)
        assert found.arrival.complete


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_gate_of_several_snapshots_waits_for_what_is_read_of_each(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    """An operation may read rows of one snapshot at indices of another. The gate must wait for the indices first: only they say
    which rows are read."""
    indices, table, unused = torch.tensor([7, 200]), torch.randn(256, 64), torch.randn(64, 64)
    both = []
    for name, tensors in (("base", {"indices": indices, "unused": unused}), ("style", {"table": table})):
        (folder := tmp_path / name / "arriving").mkdir(parents=True)
        save_file(tensors, folder.parent / "model.safetensors")
        both.append(Arriving(folder.parent, folder, create(folder.parent, chunk_bytes=CHUNK_BYTES)))
        both[-1].arrival.on_demand(both[-1].on_demand)
    base, style = both
    found = views(base.mapping, ["*"]) | views(style.mapping, ["*"])
    with Gate(*(Unlanded(both[number].mapping, both[number].arrival) for number in order)):
        rows = torch.nn.functional.embedding(found["indices"], found["table"])
    assert torch.equal(rows, table[indices])
    assert not base.arrival.complete
    assert not style.arrival.complete
    for one in both:
        one.close()


def test_fused_layers_that_bypass_their_modules_wait_too(save: Save) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, events: torch.Tensor) -> torch.Tensor:
            return self.layer(events)

    whole = Fused().eval()
    events = torch.randn(2, 5, 32)
    with arriving(save, whole) as found:
        module = blank(Fused).eval()
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        found.arrival.on_demand(found.on_demand)
        with torch.inference_mode():
            expected = whole(events)
            with Gate(Unlanded(found.mapping, found.arrival)):
                assert torch.equal(module(events), expected)


def test_a_compiled_module_waits_too(save: Save) -> None:
    whole = Tied().eval()
    tokens = torch.tensor([[3, 200, 3]])
    with arriving(save, whole) as found:
        module = blank(Tied)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        compiled = torch.compile(module, backend="eager")
        found.arrival.on_demand(found.on_demand)
        with torch.inference_mode(), Gate(Unlanded(found.mapping, found.arrival)):
            answer = compiled(tokens)
    with torch.inference_mode():
        assert torch.equal(answer, whole(tokens))


def test_a_failed_fetch_fails_who_waits(save: Save) -> None:
    with arriving(save, Tied()) as found:
        module = blank(Tied)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        found.arrival.fail(FetchFailed("The source burnt down."))
        with Gate(Unlanded(found.mapping, found.arrival)), pytest.raises(FetchFailed, match="burnt down"):
            module(torch.tensor([[1]]))


def test_weights_that_do_not_come_are_an_error_in_time(save: Save) -> None:
    with arriving(save, Tied()) as found:
        module = blank(Tied)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        found.arrival.deadline_s = time.monotonic() + 0.05
        with Gate(Unlanded(found.mapping, found.arrival)), pytest.raises(SourceUnavailable):
            module(torch.tensor([[1]]))


def test_the_recorded_order_is_the_order_of_use(save: Save) -> None:
    root, manifest = save(dict(Tied().state_dict()), chunk_bytes=CHUNK_BYTES)
    mapping = Mapping(root, manifest)
    module = blank(Tied)
    restore(make_plan(module, manifest), mapping)
    recorded = record_first_touch(mapping, lambda: module(torch.tensor([[1, 2]])))
    assert recorded.first_touch == ("table.weight", "b.bias", "b.weight", "a.bias", "a.weight")
    assert "unused.weight" not in recorded.first_touch
    assert Manifest.parse(recorded.to_json()) == recorded


def saved(tensor: torch.Tensor) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    found: torch.Tensor = torch.load(stream, weights_only=True)
    return found


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist(),
        lambda t: t.numpy().tolist(),
        lambda t: t[0].clone().tolist(),
        lambda t: [t[0].item()],
        lambda t: [float(word) for word in repr(t).split("[")[1].split("]")[0].split(",")],
        lambda t: saved(t).tolist(),
        lambda t: t.share_memory_().tolist(),
        lambda t: copy.deepcopy(t).tolist(),
    ],
)
def test_memory_read_without_an_operation_is_waited_for(
    save: Save, read: Callable[[torch.Tensor], list[float]]
) -> None:
    whole = Tied()
    with arriving(save, whole) as found:
        module = blank(Tied)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        found.arrival.on_demand(found.on_demand)
        with Gate(Unlanded(found.mapping, found.arrival)):
            assert read(module.a.bias.detach()) == read(whole.a.bias.detach())


class Casting(nn.Module):
    """Copies and casts its weights before it uses them. The schemas of these operations say that they may return their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.register_buffer("positions", torch.arange(8))
        self.table = nn.Embedding(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.a.weight.t().contiguous().to(torch.float64)
        return (
            x.double() @ weight
            + self.a.bias.reshape(-1).double()
            + self.table(self.positions).sum(0).double()
        )


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_casts_copies_and_looked_up_indices_wait(save: Save, mode: Callable[[], object]) -> None:
    whole = Casting()
    with arriving(save, whole) as found:
        module = blank(Casting)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        found.arrival.on_demand(found.on_demand)
        with mode():  # type: ignore[attr-defined]
            expected = whole(torch.ones(2, 64))
            with Gate(Unlanded(found.mapping, found.arrival)):
                assert torch.equal(module(torch.ones(2, 64)), expected)


def test_a_thread_that_is_started_inside_waits_for_everything(save: Save) -> None:
    whole = Tied().eval()
    with arriving(save, whole) as found:
        module = blank(Tied)
        restore(make_plan(module, found.mapping.manifest), found.mapping)
        answers: list[torch.Tensor] = []
        tokens = torch.tensor([[3, 200]])
        lander = threading.Thread(target=lambda: [found.land(chunk) for chunk in range(found.arrival.count)])
        with torch.no_grad(), Gate(Unlanded(found.mapping, found.arrival)):
            found._threads.append(lander)
            # When a thread waits for a chunk, another thread lands all chunks.
            found.arrival.on_demand(lambda *_: lander.is_alive() or plain_start(lander))
            other = threading.Thread(target=lambda: answers.append(module(tokens)))
            other.start()
            assert found.arrival.complete
        other.join(20)
        assert torch.equal(answers[0], whole(tokens))


plain_start = threading.Thread.start
