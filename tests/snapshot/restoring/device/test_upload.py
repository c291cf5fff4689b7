"""Weights are copied to a simulated device, whose copies end late and in another order, while a module runs there."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from pilotflame.errors import FetchFailed, SnapshotChanged, SnapshotError, SnapshotMismatch
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.restoring.device import buffers, open_shards, slab, upload
from pilotflame.snapshot.restoring.device.buffers import HostBuffers
from pilotflame.snapshot.restoring.gate import Gate, Uncopied
from pilotflame.snapshot.restoring.inner_tensors import tensors_with_bytes
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import blank, make_plan
from pilotflame.snapshot.restoring.plan import upload as begin_upload
from safetensors.torch import save_file
from simulated_device import SimulatedDevice
from torch import nn
from torch.torch_version import TorchVersion
from wrapper_weights import wrap

Save = Callable[..., tuple[Path, Manifest]]
CHUNK_BYTES = 4096
WAIT_S = 20.0


class Net(nn.Module):
    """An embedding that is the head too, layers of odd sizes, and a buffer that is computed and not saved."""

    scale: torch.Tensor

    def __init__(self, layers: int = 3, width: int = 63) -> None:
        super().__init__()
        self.table = nn.Embedding(97, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 97, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.arange(width) / width, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens) * self.scale
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return self.head(hidden)


class Source:
    """A snapshot whose chunks land in its file when the test says so."""

    def __init__(self, whole: Path, root: Path, manifest: Manifest) -> None:
        root.mkdir()
        self.arrival, self.manifest = Arrival(manifest), manifest
        self._data = (whole / "model.safetensors").read_bytes()
        self._path = root / "model.safetensors"
        self._path.touch()
        os.truncate(self._path, len(self._data))
        self.mapping = Mapping(root, manifest, arrival=self.arrival)

    def land(self, chunk: int) -> None:
        extent = self.arrival.chunks.extent(chunk)
        with self._path.open("r+b") as file:
            file.seek(extent.begin)
            file.write(self._data[extent.begin : extent.end])
        self.arrival.land(chunk)

    def land_in(self, order: list[int]) -> threading.Thread:
        thread = threading.Thread(target=lambda: [self.land(chunk) for chunk in order])
        thread.start()
        return thread


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small weights have many pieces, which three threads copy."""
    monkeypatch.setattr(buffers, "MOST_THREADS", 3)
    monkeypatch.setattr(upload, "copying_threads", lambda: 3)
    monkeypatch.setattr(slab.SlabLayout.__init__, "__defaults__", (5000,))


@pytest.fixture
def source(save: Save, tmp_path: Path) -> tuple[Net, Source]:
    torch.manual_seed(0)
    net = Net().eval()
    root, manifest = save(stored(net), chunk_bytes=CHUNK_BYTES)
    return net, Source(root, tmp_path / "arriving", manifest)


def stored(net: Net) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in net.state_dict().items() if name != "head.weight"}


def open_in(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return [path for path in found if path.startswith(f"{folder}/")]


def join_uploads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("snapshot-upload"):
            thread.join(WAIT_S)


def skeleton(layers: int = 3, width: int = 63, dtype: torch.dtype = torch.float32) -> Net:
    with torch.device("meta"):
        net = Net(layers, width).to(dtype)
    net.scale = (torch.arange(width) / width).to(dtype)
    return net.eval()


def in_slab(net: Net, found: upload.DeviceUpload) -> bool:
    tensors = (one for tensor in net.parameters() for one in tensors_with_bytes(tensor))
    storages = {one.untyped_storage().data_ptr() for one in tensors}
    return storages == {found.slab.untyped_storage().data_ptr()}


TOKENS = torch.tensor([[3, 90, 3, 7]])


@pytest.mark.parametrize("seed", range(100))
def test_a_module_that_runs_while_its_weights_arrive_and_are_copied_answers_as_one_that_has_them(
    save: Save, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_a_random_plan(save, tmp_path, seed, monkeypatch, wrapped=False)


@pytest.mark.parametrize("seed", range(100, 110))
def test_a_module_with_weights_of_a_wrapper_subclass_answers_so_too(
    save: Save, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_a_random_plan(save, tmp_path, seed, monkeypatch, wrapped=True)


def run_a_random_plan(
    save: Save, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, wrapped: bool
) -> None:
    draw = random.Random(seed)
    layers, width, half = draw.randint(1, 5), draw.randint(1, 70), draw.random() < 0.3
    monkeypatch.setattr(slab.SlabLayout.__init__, "__defaults__", (8 * draw.randint(30, 2000),))
    torch.manual_seed(seed)
    kept = Net(layers, width).eval()
    inner = ".held" if wrapped else ""
    tensors = {name + inner: tensor for name, tensor in stored(kept).items()}
    root, manifest = save(tensors, chunk_bytes=CHUNK_BYTES)
    names = [tensor.name for tensor in manifest.tensors]
    touch = tuple(draw.sample(names, draw.randrange(len(names))))
    source = Source(root, tmp_path / "arriving", manifest.model_copy(update={"first_touch": touch}))
    # A reference that has the weights from the start, with the same conversion.
    whole = (kept.bfloat16() if half else kept).requires_grad_(False)
    net = skeleton(layers, width, torch.bfloat16 if half else torch.float32)
    if wrapped:
        wrap(net)
    plan = make_plan(net, source.manifest, device="simulated", cast=half)
    device = SimulatedDevice(seed, delay_s=draw.choice([0.0, 0.0003, 0.001]))
    threads = draw.randint(1, 4)
    monkeypatch.setattr(upload, "copying_threads", lambda: threads)
    uploaded = begin_upload(plan, source.mapping, device)
    thread = source.land_in(draw.sample(range(source.arrival.count), source.arrival.count))
    with torch.inference_mode(), Gate(Uncopied(uploaded)):
        answer = net(TOKENS)
    with torch.inference_mode():
        assert torch.equal(answer, whole(TOKENS))
        uploaded.wait(WAIT_S)
        assert uploaded.complete
        assert torch.equal(net(TOKENS), whole(TOKENS))
    assert in_slab(net, uploaded)
    assert net.head.weight is net.table.weight
    thread.join(WAIT_S)


def test_an_operation_waits_for_the_copies_of_its_own_tensors_and_asks_for_their_chunks(
    source: tuple[Net, Source],
) -> None:
    whole, found = source
    net = skeleton()
    uploaded = begin_upload(
        make_plan(net, found.manifest, device="simulated"), found.mapping, SimulatedDevice()
    )
    threads = []

    def fetch(first: int, last: int) -> None:
        threads.append(found.land_in(list(range(first, last + 1))))

    found.arrival.on_demand(fetch)
    x = torch.ones(1, 63)
    with torch.inference_mode():
        with Gate(Uncopied(uploaded)):
            answer = net.layers[1](x)
        assert torch.equal(answer, whole.layers[1](x))
    assert not found.arrival.complete
    assert not uploaded.complete
    for thread in threads:
        thread.join(WAIT_S)
    # Land all chunks, so that the threads of the upload end.
    found.land_in(list(range(found.arrival.count))).join(WAIT_S)
    uploaded.wait(WAIT_S)


def test_what_the_device_has_to_convert_is_converted_there(save: Save) -> None:
    net = Net().eval()
    state = stored(net)
    root, manifest = save(state)
    half = skeleton().to(torch.float16)
    plan = make_plan(half, manifest, cast=True, device="simulated")
    uploaded = begin_upload(plan, Mapping(root, manifest), SimulatedDevice())
    uploaded.wait(WAIT_S)
    for name, tensor in half.state_dict().items():
        assert torch.equal(tensor, net.state_dict()[name].half()), name
    assert uploaded.slab.numel() < 1.1 * sum(tensor.nbytes for tensor in state.values()) / 2 + 256 * len(
        state
    )


def test_slices_are_contiguous_there(save: Save) -> None:
    weight = torch.randn(64, 96)
    root, manifest = save({"weight": weight})
    module = nn.Linear(24, 64, bias=False, device="meta")
    plan = make_plan(module, manifest, slices={"weight": (1, 2, 4)}, device="simulated")
    begin_upload(plan, Mapping(root, manifest), SimulatedDevice()).wait(WAIT_S)
    assert torch.equal(module.weight, weight[:, 48:72])
    assert module.weight.is_contiguous()


def test_tensors_that_are_not_aligned_in_the_file_are_aligned_there(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(5, 7), "c": torch.randn(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    # Make the length of the header odd, so that the tensors are not aligned in the file.
    (tmp_path / "model.safetensors").write_bytes(
        (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :]
    )
    manifest = create(tmp_path)
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.empty_like(tensor, device="meta"))
    begin_upload(
        make_plan(module, manifest, device="simulated"), Mapping(tmp_path, manifest), SimulatedDevice()
    ).wait(WAIT_S)
    for name, tensor in tensors.items():
        assert torch.equal(getattr(module, name), tensor)
        assert getattr(module, name).data_ptr() % 64 == 0


def test_a_failed_fetch_is_raised_by_whoever_waits(source: tuple[Net, Source]) -> None:
    _, found = source
    net = skeleton()
    uploaded = begin_upload(
        make_plan(net, found.manifest, device="simulated"), found.mapping, SimulatedDevice()
    )
    found.land(0)
    failing = threading.Timer(0.05, found.arrival.fail, [FetchFailed("The bucket burnt down.")])
    failing.start()
    with (
        Gate(Uncopied(uploaded, "snapshots.base")),
        pytest.raises(FetchFailed, match=r"snapshots\.base: The bucket"),
    ):
        net(TOKENS)
    with pytest.raises(FetchFailed):
        uploaded.wait(WAIT_S)
    assert not uploaded.complete
    failing.join()


def test_a_file_that_is_shorter_now_is_told_with_its_name(save: Save) -> None:
    root, manifest = save(stored(Net()))
    mapping = Mapping(root, manifest)
    os.truncate(root / "model.safetensors", 30_000)
    uploaded = begin_upload(make_plan(skeleton(), manifest, device="simulated"), mapping, SimulatedDevice())
    with pytest.raises(SnapshotChanged, match=r"model\.safetensors ends at byte \d+"):
        uploaded.wait(WAIT_S)


def test_few_buffers_are_used_and_nothing_stays_open(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    root, manifest = save({f"t{n}": torch.full((2000,), float(n)) for n in range(60)})
    module = nn.Module()
    for tensor in manifest.tensors:
        module.register_buffer(tensor.name, torch.empty(2000, device="meta"))
    made, buffer = list[int](), SimulatedDevice.buffer
    monkeypatch.setattr(SimulatedDevice, "buffer", lambda self, size: made.append(size) or buffer(self, size))
    device = SimulatedDevice()
    mapping = Mapping(root, manifest)
    before = open_in(root)
    uploaded = begin_upload(make_plan(module, manifest, device="simulated"), mapping, device)
    uploaded.wait(WAIT_S)
    join_uploads()
    assert len(uploaded.layout.pieces) > 60
    assert max(made) == 5000
    assert len(made) <= 7
    assert open_in(root) == before
    assert [int(module.get_buffer(f"t{n}")[0]) for n in range(60)] == list(range(60))


def test_the_arrival_keeps_no_upload_when_all_has_landed(source: tuple[Net, Source]) -> None:
    _, found = source
    for _ in range(3):
        uploaded = begin_upload(
            make_plan(skeleton(), found.manifest, device="simulated"), found.mapping, SimulatedDevice()
        )
        if not found.arrival.complete:
            found.land_in(list(range(found.arrival.count))).join(WAIT_S)
        # An error that comes after the last landing does not concern the upload.
        found.arrival.fail(FetchFailed("The bucket burnt down."))
        uploaded.wait(WAIT_S)
        uploaded.end(WAIT_S)
        assert uploaded.complete
        gone = weakref.ref(uploaded)
        del uploaded
        join_uploads()
        gc.collect()
        assert gone() is None


def test_a_fetch_that_moves_to_another_folder_is_followed(source: tuple[Net, Source], tmp_path: Path) -> None:
    whole, found = source
    net = skeleton()
    uploaded = begin_upload(
        make_plan(net, found.manifest, device="simulated"), found.mapping, SimulatedDevice()
    )
    middle = found.arrival.count // 2
    for chunk in range(middle):
        found.land(chunk)
    moved = Source(found._path.parent.parent, tmp_path / "moved", found.manifest)
    found.arrival.move(tmp_path / "moved")
    for chunk in range(middle, found.arrival.count):
        moved.land(chunk)
        found.arrival.land(chunk)
    uploaded.wait(WAIT_S)
    assert torch.equal(net(TOKENS), whole(TOKENS))


@pytest.fixture
def vectors(save: Save) -> tuple[Path, Manifest]:
    return save({f"t{n}": torch.full((2000,), float(n)) for n in range(20)})


def converting(device: SimulatedDevice, vectors: tuple[Path, Manifest]) -> upload.DeviceUpload:
    """Begin an upload of several pieces, which the device converts to another dtype."""
    (root, manifest), module = vectors, nn.Module()
    for tensor in manifest.tensors:
        module.register_buffer(tensor.name, torch.empty(2000, device="meta", dtype=torch.float64))
    plan = make_plan(module, manifest, device="simulated", cast=True)
    return begin_upload(plan, Mapping(root, manifest), device)


def test_an_upload_ends_although_the_device_cannot_give_memory_back(
    vectors: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()

    def release() -> None:
        raise RuntimeError("The driver does not answer.")

    monkeypatch.setattr(device, "release", release)
    uploaded = converting(device, vectors)
    uploaded.end(2)
    assert uploaded.complete


def test_nothing_is_pinned_or_freed_after_wait_has_returned(
    vectors: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice()
    release, begun = device.release, threading.Event()

    def late() -> None:
        # If `wait` did not wait for this release, it would happen during the capture below.
        begun.wait(0.2)
        release()

    monkeypatch.setattr(device, "release", late)
    uploaded = converting(device, vectors)
    uploaded.wait(WAIT_S)
    with device.capture():
        begun.set()
        join_uploads()


def test_buffers_are_pinned_once_for_all_uploads_of_a_device(vectors: tuple[Path, Manifest]) -> None:
    device = SimulatedDevice()
    before = device.pins_left
    uploads = [converting(device, vectors) for _ in range(3)]
    for one in uploads:
        one.wait(WAIT_S)
    converting(device, vectors).wait(WAIT_S)
    # All uploads share the buffers: two for each of the three threads of an upload.
    assert before - device.pins_left <= 6


def test_buffers_grow_with_the_models() -> None:
    taken = HostBuffers(lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8))
    taken.reserve(100, 8)
    most = [taken.take(8) for _ in range(len(taken._free))]
    for buffer in most:
        taken.give(buffer, None)
    assert {taken.take(16).numel() for _ in most} == {16}


def test_pageable_memory_takes_the_place_of_what_cannot_be_pinned(vectors: tuple[Path, Manifest]) -> None:
    device = SimulatedDevice()
    device.pins_left = 1
    uploaded = converting(device, vectors)
    uploaded.wait(WAIT_S)
    assert device.pins_left == 0
    assert uploaded.complete


def test_a_rehearsal_pins_what_the_upload_needs(save: Save) -> None:
    root, manifest = save(stored(Net()))
    device, net = SimulatedDevice(), skeleton()
    plan = make_plan(net, manifest, device="simulated")
    blank(plan, device)
    pinned = device.pins_left
    assert pinned < 1 << 30
    begin_upload(plan, Mapping(root, manifest), device).wait(WAIT_S)
    assert device.pins_left == pinned


def test_a_slice_along_another_dimension_copies_no_bytes_beside_it(save: Save) -> None:
    weight = torch.randn(64, 96)
    root, manifest = save({"weight": weight})
    module = nn.Linear(24, 64, bias=False, device="meta")
    plan = make_plan(module, manifest, slices={"weight": (1, 2, 4)}, device="simulated")
    assert plan.layout is not None
    assert sum(piece.size_bytes for piece in plan.layout.pieces) == 4 * 64 * 24
    begin_upload(plan, Mapping(root, manifest), SimulatedDevice()).wait(WAIT_S)
    assert torch.equal(module.weight, weight[:, 48:72])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gathered", [True, False])
def test_slices_of_any_dimension_are_those_of_the_whole_tensor(
    save: Save, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gathered: bool
) -> None:
    monkeypatch.setattr(open_shards, "MOST_GAP_BYTES", 1 << 20 if gathered else 0)
    monkeypatch.setattr(open_shards, "GATHERED_BYTES", 3000)
    weight = torch.randn(12, 30, 8, 6)
    root, manifest = save({"weight": weight})
    for dim in range(4):
        for world in (1, 2, weight.shape[dim]):
            module, right = nn.Module(), weight.chunk(world, dim)[world - 1]
            empty = torch.empty(right.shape, device="meta", dtype=dtype)
            module.register_buffer("weight", empty)
            slices = {"weight": (dim, world - 1, world)}
            plan = make_plan(module, manifest, slices=slices, device="simulated", cast=True)
            begin_upload(plan, Mapping(root, manifest), SimulatedDevice(delay_s=0)).wait(WAIT_S)
            assert torch.equal(module.get_buffer("weight"), right.to(dtype))


# -- as a handler uses it


def opened(root: Path, manifest: Manifest, net: nn.Module, device: str) -> Snapshot:
    snapshot = Snapshot(root, manifest)
    snapshot.restore(net, device=device)
    snapshot.modules.blank()
    snapshot.open()
    return snapshot


def test_the_handle_awaits_the_copy(save: Save) -> None:
    net = Net().eval()
    root, manifest = save(stored(net))
    copied = skeleton()
    snapshot = opened(root, manifest, copied, "simulated")
    with torch.inference_mode(), Gate(*snapshot.awaited()):
        assert torch.equal(copied(TOKENS), net(TOKENS))
    snapshot.wait(WAIT_S)
    assert (snapshot.arriving, snapshot.awaited()) == (False, [])
    # What `setup` restores is there when `restore` returns.
    late = skeleton()
    snapshot.restore(late, device="simulated")
    assert torch.equal(late(TOKENS), net(TOKENS))
    recorded = snapshot.record(lambda: copied(TOKENS))
    assert recorded.first_touch[:3] == ("table.weight", "layers.0.bias", "layers.0.weight")


def test_a_rehearsal_runs_on_the_device(save: Save) -> None:
    _, manifest = save(stored(Net()))
    net = skeleton()
    blank(make_plan(net, manifest, device="simulated"), SimulatedDevice())
    assert not net(TOKENS).any()


def test_auto_is_an_error_if_the_function_has_gpus_and_torch_finds_none(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    root, manifest = save(stored(Net()))
    snapshot = Snapshot(root, manifest, gpus=2)
    snapshot.restore(skeleton(), device="auto")
    for call in (snapshot.modules.blank, snapshot.open):
        with pytest.raises(
            SnapshotError, match=r'resources\.gpus is 2, but torch finds no CUDA device for "auto"'
        ):
            call()


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_torch_that_is_too_old_for_devices_is_refused(
    save: Save, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1+cu130"))
    root, manifest = save(stored(Net()))
    with pytest.raises(SnapshotError, match=r"torch 2\.10\.1.*needs 2\.11") as found:
        opened(root, manifest, skeleton(), device)
    assert "torch>=2.11" in found.value.remedy


def test_auto_is_the_host_if_there_is_no_device(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    net = Net().eval()
    root, manifest = save(stored(net))
    mapped = skeleton()
    snapshot = opened(root, manifest, mapped, "auto")
    assert not snapshot.arriving
    assert torch.equal(mapped(TOKENS), net(TOKENS))
    with pytest.raises(SnapshotError, match="torch finds no CUDA device for 'cuda:0'"):
        opened(root, manifest, skeleton(), "cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cuda:-1", "CUDA", "cuda:01", "cuda:1000", "cuda:٣"])
def test_a_device_that_cannot_be_is_refused_at_once(save: Save, name: str) -> None:
    root, manifest = save({"weight": torch.ones(2, 2)})
    with pytest.raises(SnapshotError, match="There is no device"):
        Snapshot(root, manifest).restore(nn.Linear(2, 2, bias=False, device="meta"), device=name)


def test_what_does_not_fit_is_refused_as_on_the_host(save: Save) -> None:
    root, manifest = save({"weight": torch.ones(2, 3)})
    with pytest.raises(SnapshotMismatch, match="of another shape"):
        Snapshot(root, manifest).restore(nn.Linear(2, 2, bias=False, device="meta"), device="simulated")
