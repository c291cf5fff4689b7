"""Defines the object that a handler receives as `context.snapshot`, or for each name in `context.snapshots`.

The handler's `build` runs in the zygote, where no weights are mapped: there, `restore` only computes a plan.
Each worker is forked from the zygote, and applies these plans in `open`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapshotError, snapshot_errors_about
from .extras import needs
from .restoring.restored_modules import UPLOAD_TIMEOUT_S, RestoredModules

if TYPE_CHECKING:
    import torch

    from .caching.cache import Lease
    from .fetching.arrival import Arrival
    from .format.compared import ComparedShards
    from .format.manifest import Manifest
    from .format.slices import Slices
    from .restoring.gate import Awaited
    from .restoring.mapping import Mapping

# The subject of the error message if torch is not installed.
_SUBJECT = "context.snapshot"
_COMMON = ("F32", "F64", "F16", "BF16")
ADAPTERS = "adapters."
"""The prefix of the names of snapshots in the table `[adapters]`. A name in `[snapshots]` has no dot, so the names differ."""


class Snapshot:
    """Weights of a function, on this node. The attribute `manifest` describes them."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        *,
        name: str = "",
        versions: dict[str, str] | None = None,
        assets: Path | None = None,
        cache: Path | None = None,
        mounted: Sequence[Path] = (),
        parks: bool = True,
        gpus: int = 0,
    ) -> None:
        """Describe a snapshot in `cache`, the folder of the node's cache, or else in folder `root`.

        `name` is the snapshot's key in the settings if the function has several snapshots. Errors begin with it. With
        `cache`, the shards are in that cache or are still being fetched into it, and `root` holds only the assets. In
        a container, `mounted` are the folders of this snapshot in the cache. Without `cache`, `root` holds the shards, and
        `assets` or else `root` the other files. Then `versions` has the version of each shard that was compared with the
        manifest before (`ComparedShards`): `open` refuses shards with other bytes. If `versions` is None, no bytes are
        compared. Without `parks`, copies to devices make no checksums, so `park` copies all weights to the
        host. `gpus` is the number of the function's GPUs. If it is not 0, the device "auto" is never the host.
        """
        self.root = root
        self.manifest = manifest
        self.name = name
        self._stored = _SnapshotFiles(root, manifest, versions, assets, cache, mounted)
        self.compares = self._stored.compared is not None
        """True if `check` compares bytes. If it is False, `check` does nothing."""
        # `_restores` is True if `load` was called, or `reference`, with which another process opens the weights. `_viewed` is
        # True if `load` has returned views of the mapped files.
        self._restores = self._viewed = False
        self.fetched = cache is not None
        """True if the weights are fetched into the node's cache."""
        self._subject = subject_of(name)
        self.modules = RestoredModules(self._subject, parks=parks, gpus=gpus)
        self.gated = False
        """True if the function runs its model within `gate`, in whatever thread. Then its worker need not wait for all weights."""
        self._arrival: Arrival | None = None
        self._mapping: Mapping | None = None

    @property
    def path(self) -> Path:
        """The folder with the assets (config.json, tokenizer). Without a cache, it also has the weights, or links to them."""
        return self._stored.path

    @property
    def dtype(self) -> torch.dtype:
        """The dtype for a model whose config.json names no dtype. As in transformers, it is the dtype of the first tensor with a
        common floating-point type: the first by name in the first shard. If there is none, it is float32.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.place import TORCH_DTYPES  # noqa: PLC0415

        first = sorted((entry.name, entry.dtype) for entry in self.manifest.tensors if entry.shard == 0)
        return TORCH_DTYPES[next((dtype for _, dtype in first if dtype in _COMMON), _COMMON[0])]

    def check(self) -> None:
        """Raise SnapshotChanged if the handler may read other bytes than the manifest describes.

        Compare the mapped files, except weights that are already on a device. A handler that neither restores nor loads may
        open the files itself. In this case, compare the files that have the names of the shards now.
        """
        if self._stored.compared is None:
            return
        with snapshot_errors_about(self._subject):
            if not (self._restores or self.modules.restored):
                self._stored.compared.check()
            elif self._mapping is not None and (self._viewed or self.modules.read_files):
                self._mapping.check()

    def skeleton(self) -> AbstractContextManager[None]:
        """Return a context in which new modules have parameters without memory (on the meta device).

        Buffers that a module computes are real tensors.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.skeleton import skeleton  # noqa: PLC0415  only restoring loads torch

        return skeleton()

    def restore(
        self,
        module: torch.nn.Module,
        *,
        prefix: str = "",
        ignore: Sequence[str] = (),
        cast: bool = False,
        slices: Slices | None = None,
        device: str = "cpu",
    ) -> None:
        """Set the module's weights to views of the mapped snapshot. If `build` calls this, each worker sets the weights later.

        The mapping is private and copy-on-write: writing to a weight changes no file and no other process.
        `prefix` is prepended to the module's tensor names to find them in the snapshot. A tensor of the snapshot that
        the module does not have is an error, unless one of the regular expressions in `ignore` is found in its name
        (`re.search`, as in transformers). With `cast`, floating-point weights are converted to the module's dtype,
        which copies them once for all workers of a zygote. Without `cast`, the dtypes must be equal. Raise
        SnapshotMismatch, which names all tensors that do not fit.

        `slices` is for a module that has a part of each weight, such as the module of one worker of a
        tensor-parallel group. It maps patterns of the snapshot's names, in which * stands for any characters,
        to (dim, rank, world): the module gets slice number `rank` of `world` equal slices along `dim`. If several
        patterns fit a name, the first one is used. By default, the setting `snapshot_part` gives the slices. Slices are
        views too. A slice along another dimension than 0 is not contiguous.

        If `device` is not "cpu", the weights are copied to that device, each tensor aligned to 256 bytes. The module
        may run while they are copied. Tensors that the module has computed are moved to the device. "cuda" is the
        first CUDA device, and "cuda:1" is the second. "auto" is the first CUDA device, or the host if there is no CUDA
        device and the function has no `resources.gpus`. Raise SnapshotError if there is no such device, or if the device
        has too little free memory.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.plan import make_plan  # noqa: PLC0415

        with snapshot_errors_about(self._subject):
            plan = make_plan(
                module, self.manifest, prefix=prefix, ignore=ignore, cast=cast, slices=slices, device=device
            )
            self.modules.apply(plan)

    def load(self, *names: str, slices: Slices | None = None) -> dict[str, torch.Tensor]:
        """Return tensors that belong to no module, such as the statistics of a quantised weight, by their names.

        In `names`, * stands for any characters. All tensors whose name fits one of `names` are returned. As in
        `restore`, the tensors are views of the mapped snapshot, and `slices` cuts them. Call this in `setup`, because in
        `build` nothing is mapped. Raise SnapshotMismatch if there is no such tensor or slice, and SnapshotError if
        the snapshot is not open.
        """
        if self._mapping is None:
            raise SnapshotError(
                "The snapshot is not open yet.", remedy="Call `load` in `setup`, not in `build`."
            )
        from .restoring.views import views  # noqa: PLC0415

        self._restores = self._viewed = True
        with snapshot_errors_about(self._subject):
            return views(self._mapping, names, slices)

    def arrived(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor and each alias with its name, once its bytes have arrived, in the order of the manifest.

        The tensors are views as in `load`. Operations on them need no gate. Raise the error of the fetch.
        """
        from .restoring.views import arrived  # noqa: PLC0415

        found = self.load("*")
        if self._mapping is not None:
            yield from arrived(self._mapping, found)

    @property
    def files(self) -> Path:
        """The folder with the weights and the assets. Its files are complete once all bytes have arrived.

        Without a cache, this is the deployed folder itself. `path` may have only links to the weights, and ONNX Runtime refuses
        links that lead out of a folder. The assets in this folder may have changed since the deploy. The assets in `path` have not.
        """
        return self._stored.folder

    def reference(self) -> dict[str, Any]:
        """Return JSON for `referred` in another process of this node. Keep this object until `referred` has returned there."""
        self._restores = True
        deadline_s = None if self._arrival is None else self._arrival.deadline_s
        return {**self._stored.reference(), "name": self.name, "deadline_s": deadline_s}

    @classmethod
    def referred(cls, reference: dict[str, Any]) -> Snapshot:
        """Return the snapshot of a `reference`, open. Raise ManifestError if its manifest is not valid, and the errors of `open`."""
        from .format.manifest import Manifest  # noqa: PLC0415

        cache, assets = reference["cache"], reference["assets"]
        made = cls(
            Path(reference["root"]), Manifest.parse(reference["manifest"].encode()), name=reference["name"],
            versions=reference["versions"], assets=None if assets is None else Path(assets),
            cache=None if cache is None else Path(cache), mounted=[Path(path) for path in reference["mounted"]],
        )  # fmt: skip
        # Processes of one machine share the monotonic clock.
        made.open(reference["deadline_s"])
        return made

    def pin(self, stop: Callable[[], bool]) -> None:
        """Pin the files of weights that go to a device, so that the copy takes less time. End early once `stop` returns True.

        A standby calls this after `rehearse`. Do nothing if the weights are fetched into the cache, because those files are
        opened later.
        """
        if not self.fetched:
            self.modules.pin(self.manifest, self._stored.open, stop)

    def open(self, by_s: float | None = None) -> None:
        """Map the files into memory and apply the plans that `build` made. Read ahead the files that lie on a disk.

        Later waits for bytes that are being fetched end at `by_s`, in monotonic seconds. Raise SnapshotChanged if a local file
        does not have the bytes of the manifest.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.mapping import Mapping  # noqa: PLC0415

        with snapshot_errors_about(self._subject):
            self._mapping = self._stored.map(Mapping)
            self._arrival = self._mapping.arrival
            self.modules.open(self._mapping)
            # Do not read ahead while bytes arrive: a fetch still writes them, or a copy to a device reads the files.
            if not self.arriving:
                self._mapping.read_ahead()
        if by_s is not None and self._arrival is not None:
            self._arrival.deadline_s = by_s

    @property
    def arriving(self) -> bool:
        """True while some bytes are not fetched or copied yet. Until then, operations outside a gate may read wrong bytes."""
        fetching = self._arrival is not None and not self._arrival.complete
        return fetching or not self.modules.complete

    def awaited(self) -> list[Awaited]:
        """Return the bytes that are not fetched or copied yet, as the arguments of a `Gate`."""
        if self._mapping is None or not self.arriving:
            return []
        from .restoring.gate import Uncopied, Unlanded  # noqa: PLC0415

        arrival, until_s = self._arrival, time.monotonic()
        found: list[Awaited] = []
        if arrival is not None and not arrival.complete:
            until_s = arrival.deadline_s
            found.append(Unlanded(self._mapping, arrival, self._subject))
        # Copies to devices may end up to UPLOAD_TIMEOUT_S after the deadline of the arrival or, if all bytes have arrived,
        # up to UPLOAD_TIMEOUT_S from now on.
        until_s += UPLOAD_TIMEOUT_S
        copies = [one for one in self.modules.uploads if not one.complete]
        return [*(Uncopied(one, self._subject, until_s) for one in copies), *found]

    def gate(self) -> AbstractContextManager[Any]:
        """Return a context in which each torch operation of this thread waits for the bytes of its tensors."""
        return gate_of(self.awaited())

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all bytes. Raise the error of the fetch, or SourceUnavailable after `timeout_s`.

        By default, the fetch may take until the deadline of the arrival. Afterwards, each copy to a device may take
        UPLOAD_TIMEOUT_S.
        """
        with snapshot_errors_about(self._subject):
            if self._arrival is not None and self._arrival.count:
                self._arrival.wait(0, self._arrival.count - 1, timeout_s)
            self.modules.wait(UPLOAD_TIMEOUT_S if timeout_s is None else timeout_s)

    def record(self, run: Callable[[], Any]) -> Manifest:
        """Call `run`. Return a manifest with the order in which this thread first read the tensors."""
        from .restoring.touch import record_first_touch  # noqa: PLC0415

        if self._mapping is None:
            raise SnapshotError("The snapshot is not open.", remedy="Call `open` before `record`.")
        return record_first_touch(self._mapping, run, self.modules.uploads)

    def __repr__(self) -> str:
        return f"Snapshot({str(self.root)!r}, {len(self.manifest.tensors)} tensors)"


class _SnapshotFiles:
    """The files of one snapshot on this node: in a folder, or in the node's cache. For the arguments see `Snapshot`."""

    def __init__(
        self, root: Path, manifest: Manifest, versions: dict[str, str] | None,
        assets: Path | None, cache: Path | None, mounted: Sequence[Path],
    ) -> None:  # fmt: skip
        self._root, self._manifest, self._assets = root, manifest, assets
        self._cache, self._mounted = cache, mounted
        self._lease: Lease | None = None
        self.compared: ComparedShards | None = None
        """Compares local shards with the manifest. None if no bytes are compared."""
        if versions is not None and cache is None:
            from .format.compared import ComparedShards  # noqa: PLC0415  only local weights need it

            self.compared = ComparedShards(folder_of(root), manifest, versions)

    @property
    def path(self) -> Path:
        """The folder with the assets."""
        return self._assets if self._assets is not None else folder_of(self._root)

    @property
    def folder(self) -> Path:
        """The folder with the weights."""
        return folder_of(self._root) if self._lease is None else self._lease.root

    def open(self, name: str) -> int:
        """Return a descriptor of a local shard. Raise SnapshotChanged if its bytes differ, or another SnapshotError."""
        from .sources.folder import FolderSource  # noqa: PLC0415  only local weights need it

        return (self.compared or FolderSource(self.folder)).open(name)

    def map(self, kind: type[Mapping]) -> Mapping:
        """Map the shards. Chunks of a snapshot in the cache may still be arriving."""
        if self._cache is None:
            return kind(self.folder, self._manifest, self.compared)
        from .caching.node import follow  # noqa: PLC0415  only remote weights need it

        self._lease = lease = follow(self._cache, self._manifest, self._mounted)
        return kind(lease.root, self._manifest, keep=lease, arrival=lease.arrival)

    def reference(self) -> dict[str, Any]:
        """Return the arguments as JSON."""
        return {
            "root": str(self._root), "manifest": self._manifest.to_json().decode(),
            "cache": None if self._cache is None else str(self._cache), "mounted": [str(path) for path in self._mounted],
            "versions": None if self.compared is None else self.compared.versions,
            "assets": None if self._assets is None else str(self._assets),
        }  # fmt: skip


def gate_of(awaited: Sequence[Awaited]) -> AbstractContextManager[Any]:
    """Return a context in which each torch operation of this thread waits for these bytes."""
    if not awaited:
        return nullcontext()
    from .restoring.gate import Gate  # noqa: PLC0415

    return Gate(*awaited)


def folder_of(root: Path) -> Path:
    """Return the folder of the weights. `root` is this folder, or a file in it, which may no longer exist."""
    return root.parent if root.suffix == ".safetensors" and not root.is_dir() else root


def subject_of(name: str) -> str:
    """Return the name of a snapshot in messages, made from its key in the settings. "" for the only snapshot."""
    return name if not name or is_adapter(name) else f"snapshots.{name}"


def is_adapter(name: str) -> bool:
    """Return True if the snapshot is in the table `[adapters]`. Such a snapshot is fetched when a request first needs it."""
    return name.startswith(ADAPTERS)
