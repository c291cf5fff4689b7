"""Defines the object that a handler receives as `context.snapshot`, or for each name in `context.snapshots`.

The handler's `build` runs in the zygote, where no weights are mapped: there, `restore` only computes a plan.
Each worker is forked from the zygote, and applies these plans in `open`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapshotError
from .extras import needs

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .caching.cache import Lease
    from .fetching.arrival import Arrival
    from .format.compared import ComparedShards
    from .format.manifest import Manifest
    from .format.slices import Slices
    from .restoring.device.device import Device
    from .restoring.device.parking import ParkedWeights
    from .restoring.device.pinned_shards import PinnedShards
    from .restoring.device.upload import DeviceUpload
    from .restoring.gate import Awaited
    from .restoring.mapping import Mapping
    from .restoring.plan import Plan

# The subject of the error that torch is not installed.
_SUBJECT = "context.snapshot"
UPLOAD_TIMEOUT_S = 600.0
ADAPTERS = "adapters."
"""The names of the snapshots in the table `[adapters]` begin with it. No name in `[snapshots]` has a dot."""


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
        manifest before (`ComparedShards`): `open` refuses shards with other bytes. If it is None, no bytes are
        compared. Without `parks`, copies to devices make no checksums, so `park` copies all weights to the
        host. `gpus` is the number of the function's GPUs. If it is not 0, the device "auto" is never the host.
        """
        self.root = root
        self.manifest = manifest
        self.name = name
        self._assets = assets
        self._compared: ComparedShards | None = None
        if versions is not None and cache is None:
            from .format.compared import ComparedShards  # noqa: PLC0415  only local weights need it

            self._compared = ComparedShards(folder_of(root), manifest, versions)
        # Whether modules or another process get the weights, and whether tensors are views of the mapped files.
        self._restores = self._viewed = False
        self._cache, self._mounted = cache, mounted
        self._parks, self._gpus = parks, gpus
        self.gated = False
        """True if the function runs its model within `gate`. Then its worker need not wait for all weights, whatever thread that is."""
        self._arrival: Arrival | None = None
        self._lease: Lease | None = None
        self._plans: list[Plan] = []
        self._mapping: Mapping | None = None
        # Weak references, so that a module that `setup` restored can be freed. `_plans` keeps the modules of `build`.
        self._uploads: list[tuple[weakref.ref[nn.Module], DeviceUpload]] = []
        self._parked: list[tuple[weakref.ref[nn.Module], ParkedWeights]] = []
        self._pinned: PinnedShards | None = None
        # The devices that this process has used, by their names.
        self._devices: dict[str, Device] = {}

    @property
    def path(self) -> Path:
        """The folder with the assets (config.json, tokenizer). Without a cache, it also holds the weights, or links to them."""
        return self._assets if self._assets is not None else folder_of(self.root)

    @property
    def fetched(self) -> bool:
        """True if the weights are fetched into the node's cache."""
        return self._cache is not None

    @property
    def compares(self) -> bool:
        """True if `check` can find other bytes."""
        return self._compared is not None

    def check(self) -> None:
        """Raise SnapshotChanged if the handler may read other bytes than the manifest describes.

        It compares the mapped files, except weights that are on a device already. If the handler restores and loads
        nothing, it may open the files itself: then it compares the files that have the names of the shards now.
        """
        if self._compared is None:
            return
        with self._named():
            if not self._restores:
                self._compared.check()
            elif self._mapping is not None and (
                self._viewed or not all(one.compared for _, one in self._uploads)
            ):
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
        """Set the module's weights to views of the mapped snapshot. If `build` calls it, each worker sets them later.

        The mapping is private and copy-on-write: writing to a weight changes no file and no other process.
        `prefix` is prepended to the module's tensor names to find them in the snapshot. A tensor of the snapshot that
        the module does not have is an error, unless one of the regular expressions in `ignore` is found in its name
        (`re.search`, as in transformers). With `cast`, floating-point weights are converted to the module's dtype,
        which copies them. Without `cast`, the dtypes must be equal. Raises SnapshotMismatch, which names all tensors
        that do not fit.

        `slices` is for a module that has a part of each weight, such as the module of one worker of a
        tensor-parallel group. It maps patterns of the snapshot's names, in which * stands for any characters,
        to (dim, rank, world): the module gets slice number `rank` of `world` equal slices along `dim`. The
        first pattern that fits a name counts. By default, the setting `snapshot_part` gives the
        slices. Slices are views too. A slice along another dimension than 0 is not contiguous.

        If `device` is not "cpu", the weights are copied to that device, each tensor aligned to 256 bytes. The module
        may run while they are copied. Tensors that the module has computed are moved to the device. "cuda" is the
        first CUDA device, and "cuda:1" is the second. "auto" is the first CUDA device, or the host if there is no CUDA
        device and the function has no `resources.gpus`. Raises SnapshotError if there is no such device, or if it has
        no room.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.plan import make_plan  # noqa: PLC0415

        with self._named():
            plan = make_plan(
                module, self.manifest, prefix=prefix, ignore=ignore, cast=cast, slices=slices, device=device
            )
            self.apply(plan)

    def apply(self, plan: Plan) -> None:
        """Apply a plan that was made for this snapshot: now if the snapshot is open, or else when it is opened."""
        self._restores = True
        if self._mapping is None:
            self._plans.append(plan)
        elif (upload := self._apply(plan, self._mapping)) is not None:
            # `setup` runs without a gate, and may use the module as soon as this returns.
            upload.wait(UPLOAD_TIMEOUT_S)

    def _apply(self, plan: Plan, mapping: Mapping) -> DeviceUpload | None:
        from .restoring.device.device import find_device  # noqa: PLC0415  only restoring loads torch
        from .restoring.plan import restore, upload  # noqa: PLC0415

        if (device := find_device(plan.device, self._gpus)) is None:
            restore(plan, mapping)
            self._viewed = True
            return None
        self._devices[device.name] = device
        self._uploads = [(module, one) for module, one in self._uploads if module() is not None]
        made = upload(plan, mapping, device, parks=self._parks, pinned=self._pinned)
        self._uploads.append((weakref.ref(plan.module), made))
        return made

    def load(self, *names: str, slices: Slices | None = None) -> dict[str, torch.Tensor]:
        """Return tensors that no module holds, such as the statistics of a quantised weight, by their names.

        In `names`, * stands for any characters. All tensors whose name fits one of `names` are returned. As in
        `restore`, the tensors are views of the mapped snapshot, and `slices` cuts them. Call it in `setup`, because in
        `build` nothing is mapped. Raises SnapshotMismatch if there is no such tensor or slice, and SnapshotError if
        the snapshot is not open.
        """
        if self._mapping is None:
            raise SnapshotError(
                "The snapshot is not open yet.", remedy="Call `load` in `setup`, not in `build`."
            )
        from .restoring.views import views  # noqa: PLC0415

        self._restores = self._viewed = True
        with self._named():
            return views(self._mapping, names, slices)

    def arrived(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor and each alias with its name, once its bytes have arrived, in the order of the manifest.

        The tensors are views as in `load`. They need no gate. Raises the error of the fetch.
        """
        from .restoring.place import place  # noqa: PLC0415

        found = self.load("*")
        aliases = dict[str, list[str]]()
        for alias, target in self.manifest.aliases.items():
            aliases.setdefault(target, []).append(alias)
        for entry in self.manifest.tensors:
            if self._mapping is not None:
                where = place(entry)
                self._mapping.wait(entry.shard, where.begin_bytes, where.end_bytes)
            for name in (entry.name, *aliases.get(entry.name, ())):
                yield name, found[name]

    @property
    def files(self) -> Path:
        """The folder with the weights and the assets. Its files are whole once all bytes have arrived.

        Without a cache, it is the folder of the deploy itself, because ONNX Runtime refuses links that lead out of a folder.
        So its assets may have changed since the deploy. The assets in `path` have not.
        """
        return folder_of(self.root) if self._lease is None else self._lease.root

    def reference(self) -> dict[str, Any]:
        """Return JSON for `referred` in another process of this node. This process must hold the snapshot meanwhile."""
        self._restores = True
        return {
            "root": str(self.root), "manifest": self.manifest.to_json().decode(), "name": self.name,
            "cache": None if self._cache is None else str(self._cache), "mounted": [str(path) for path in self._mounted],
            "versions": None if self._compared is None else self._compared.versions,
            "assets": None if self._assets is None else str(self._assets),
            "deadline_s": None if self._arrival is None else self._arrival.deadline_s,
        }  # fmt: skip

    @classmethod
    def referred(cls, reference: dict[str, Any]) -> Snapshot:
        """Return the snapshot of a `reference`, open. Raises ManifestError if its manifest is not valid, and the errors of `open`."""
        from .format.manifest import Manifest  # noqa: PLC0415

        cache, assets = reference["cache"], reference["assets"]
        made = cls(
            Path(reference["root"]), Manifest.parse(reference["manifest"].encode()), name=reference["name"],
            versions=reference["versions"], assets=None if assets is None else Path(assets),
            cache=None if cache is None else Path(cache), mounted=[Path(path) for path in reference["mounted"]],
        )  # fmt: skip
        made.open()
        if reference["deadline_s"] is not None:
            # Processes of one machine share the monotonic clock.
            made.limit(reference["deadline_s"])
        return made

    def blank(self) -> None:
        """Set the weights of the modules that `build` restored to zeros, which take no memory on the host.

        A standby worker calls it before `rehearse`, because the real weights are set only later, by `open`.
        """
        from .restoring.device.device import find_device  # noqa: PLC0415
        from .restoring.plan import blank  # noqa: PLC0415

        for plan in self._plans:
            if (device := find_device(plan.device, self._gpus)) is not None:
                self._devices[device.name] = device
            blank(plan, device, parks=self._parks)

    def pin(self, stop: Callable[[], bool]) -> None:
        """Pin the files of weights that go to a device, until `stop` returns True. Then the copy takes less time.

        A standby calls it after `rehearse`. Files that are fetched later, when the snapshot is opened, are not pinned.
        """
        from .restoring.device.device import find_device  # noqa: PLC0415
        from .restoring.device.pinned_shards import shards_to_pin  # noqa: PLC0415
        from .sources.folder import FolderSource  # noqa: PLC0415

        for plan in self._plans if self._cache is None else ():
            if plan.layout is None or (device := find_device(plan.device, self._gpus)) is None:
                continue
            if self._pinned is None:
                source = self._compared or FolderSource(folder_of(self.root))
                self._pinned = shards_to_pin(device, self.manifest, source.open)
            if self._pinned is not None:
                self._pinned.pin(plan.layout.pieces, stop)

    def open(self) -> None:
        """Map the files into memory and apply the plans that `build` made. Read ahead the files that lie on a disk.

        Raises SnapshotChanged if a local file does not have the bytes of the manifest.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.mapping import Mapping  # noqa: PLC0415

        with self._named():
            self._mapping = self._mapped(Mapping)
            for plan in self._plans:
                self._apply(plan, self._mapping)
            # Do not read ahead while bytes arrive: a fetch still writes them, or a copy to a device reads the files.
            if not self.arriving:
                self._mapping.read_ahead()

    def _mapped(self, kind: type[Mapping]) -> Mapping:
        if self._cache is None:
            return kind(folder_of(self.root), self.manifest, self._compared)
        from .caching.node import follow  # noqa: PLC0415  only remote weights need it

        self._lease = lease = follow(self._cache, self.manifest, self._mounted)
        self._arrival = lease.arrival
        return kind(lease.root, self.manifest, keep=lease, arrival=lease.arrival)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let a SnapshotError of the block begin with the snapshot's name."""
        try:
            yield
        except SnapshotError as error:
            if not self.name:
                raise
            raise error.about(subject_of(self.name)) from error

    @property
    def arriving(self) -> bool:
        """True while bytes are not fetched or copied yet. Then operations outside a gate may read wrong bytes."""
        fetching = self._arrival is not None and not self._arrival.complete
        return fetching or not all(one.complete for _, one in self._uploads)

    def awaited(self) -> list[Awaited]:
        """Return the bytes that are not fetched or copied yet, as the arguments of a `Gate`."""
        if self._mapping is None or not self.arriving:
            return []
        from .restoring.gate import Uncopied, Unlanded  # noqa: PLC0415

        subject = subject_of(self.name)
        until_s = self._deadline_s
        found: list[Awaited] = [
            Uncopied(one, subject, until_s) for _, one in self._uploads if not one.complete
        ]
        if self._arrival is not None and not self._arrival.complete:
            found.append(Unlanded(self._mapping, self._arrival, subject))
        return found

    def gate(self) -> AbstractContextManager[Any]:
        """Return a context in which each torch operation of this thread waits for the bytes of its tensors."""
        if not (awaited := self.awaited()):
            return nullcontext()
        from .restoring.gate import Gate  # noqa: PLC0415

        return Gate(*awaited)

    def limit(self, deadline_s: float) -> None:
        """End each wait for bytes that are being fetched at `deadline_s`, in monotonic seconds."""
        if self._arrival is not None:
            self._arrival.deadline_s = deadline_s

    @property
    def _deadline_s(self) -> float:
        """When all bytes must be on the devices: UPLOAD_TIMEOUT_S after the arrival's deadline, or after its end."""
        arrival = self._arrival
        landed_s = time.monotonic() if arrival is None or arrival.complete else arrival.deadline_s
        return landed_s + UPLOAD_TIMEOUT_S

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all bytes. Raises the error of the fetch, or SourceUnavailable after `timeout_s`.

        By default, the fetch may take until the deadline of the arrival. Afterwards, each copy to a device may take
        UPLOAD_TIMEOUT_S.
        """
        with self._named():
            if self._arrival is not None and self._arrival.count:
                self._arrival.wait(0, self._arrival.count - 1, timeout_s)
            for _, upload in self._uploads:
                upload.wait(UPLOAD_TIMEOUT_S if timeout_s is None else timeout_s)

    @property
    def copied(self) -> tuple[float, float] | None:
        """When the first copy to a device began and the last one ended, by the monotonic clock. None without copies.

        The end is 0 while a copy runs.
        """
        if not (found := [one for _, one in self._uploads]):
            return None
        running = not all(one.ended_s for one in found)
        return min(one.started_s for one in found), 0.0 if running else max(one.ended_s for one in found)

    @property
    def device_made(self) -> tuple[float, float] | None:
        """When the creation of the device and of the process's context on it began and ended. None without a device."""
        return self._uploads[0][1].device.made_s if self._uploads else None

    # -- for `Snapshots.park`

    @property
    def slabs(self) -> list[torch.Tensor]:
        """The memory of the weights on devices."""
        return [upload.slab for _, upload in self._uploads]

    def park(self, slabs: Sequence[torch.Tensor], timeout_s: float = UPLOAD_TIMEOUT_S) -> int:
        """Free the device memory of the weights. Return the freed bytes. `slabs` has the slabs of all snapshots."""
        if not self._uploads:
            return 0
        from .restoring.device.parking import park  # noqa: PLC0415

        freed_bytes = 0
        with self._named():
            while self._uploads:
                module, upload = self._uploads[-1]
                parked = park(module(), upload, slabs, timeout_s)
                self._parked.append((module, parked))
                self._uploads.pop()
                freed_bytes += parked.freed_bytes
        return freed_bytes

    def unpark(self) -> None:
        """Copy the weights to their devices again. After an error, call it again for weights that are still parked."""
        if not self._parked:
            return
        from .restoring.device.parking import unpark  # noqa: PLC0415

        with self._named():
            while self._parked:
                module, parked = self._parked[-1]
                self._uploads.append((module, unpark(parked)))
                self._parked.pop()

    def finish(self) -> None:
        """Wait until the devices have done all work of this process. Raises the error of a failed device."""
        for device in self._devices.values():
            device.finish()

    def record(self, run: Callable[[], Any]) -> Manifest:
        """Call `run`. Return a manifest with the order in which this thread first read the tensors."""
        from .restoring.touch import record_first_touch  # noqa: PLC0415

        if self._mapping is None:
            raise SnapshotError("The snapshot is not open.", remedy="Call `open` before `record`.")
        return record_first_touch(self._mapping, run, [one for _, one in self._uploads])

    def __repr__(self) -> str:
        return f"Snapshot({str(self.root)!r}, {len(self.manifest.tensors)} tensors)"


def folder_of(root: Path) -> Path:
    """Return the folder of the weights. `root` is this folder or a file in it, which may be gone."""
    return root.parent if root.suffix == ".safetensors" and not root.is_dir() else root


def subject_of(name: str) -> str:
    """Return the name of a snapshot in messages, made from its key in the settings. "" for the only snapshot."""
    return name if not name or is_adapter(name) else f"snapshots.{name}"


def is_adapter(name: str) -> bool:
    """Return True if the snapshot is of the table `[adapters]`, and so fetched when a request first needs it."""
    return name.startswith(ADAPTERS)
