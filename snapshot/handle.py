"""Defines the object that a handler receives as `context.snapshot`.

The handler's `build` runs in the zygote, where no weights are mapped: there, `restore` only computes a plan.
Each worker is forked from the zygote, and applies these plans in `open`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapshotError
from .extras import needs

if TYPE_CHECKING:
    import torch

    from .fetching.arrival import Arrival
    from .format.manifest import Manifest
    from .restoring.mapping import Mapping
    from .restoring.plan import Plan
    from .sources.source import ObjectInfo

# What needs torch, in the error of an environment without it.
_SUBJECT = "context.snapshot"


class Snapshot:
    """The weights of one function, on this node. The attribute `manifest` describes them."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        verified: Sequence[ObjectInfo] | None = None,
        *,
        cache: Path | None = None,
        mounted: Sequence[Path] = (),
    ) -> None:
        """Describe a snapshot in `cache`, the folder of the node's cache, or else in folder `root`.

        With `cache`, the shards are in that cache or are still being fetched into it, and `root` holds only
        the assets. In a container, `mounted` are the folders of that snapshot in the cache. Without `cache`, `root` holds all files, and `open` refuses a shard that differs from its
        entry in `verified`, which is what `FolderSource.stat` returned for the verified file.
        """
        self.root = root
        self.manifest = manifest
        self._verified = verified
        self._cache, self._mounted = cache, mounted
        self._arrival: Arrival | None = None
        self._plans: list[Plan] = []
        self._mapping: Mapping | None = None

    @property
    def path(self) -> Path:
        """The folder with the assets (config.json, tokenizer). Without a cache, it also holds the weights."""
        return self.root if self.root.is_dir() else self.root.parent

    def skeleton(self) -> AbstractContextManager[None]:
        """Return a context in which new modules have parameters without memory (on the meta device).

        Buffers that a module computes are real tensors.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.skeleton import skeleton  # noqa: PLC0415  only restoring loads torch

        return skeleton()

    def restore(
        self, module: torch.nn.Module, *, prefix: str = "", ignore: Sequence[str] = (), cast: bool = False
    ) -> None:
        """Set the module's weights to views of the mapped snapshot. In `build`, each worker does it later.

        The mapping is private and copy-on-write: writing to a weight changes no file and no other process.
        `prefix` is prepended to the module's tensor names to find them in the snapshot. `ignore` has regular
        expressions: a tensor of the snapshot that the module does not have is an error unless one of them is
        found in its name (`re.search`, as in transformers). With `cast`, floating-point weights are copied to
        the module's dtype. Without it, the dtypes must be equal. Raises SnapshotMismatch, which names all
        tensors that do not fit.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.plan import make_plan, restore  # noqa: PLC0415

        plan = make_plan(module, self.manifest, prefix=prefix, ignore=ignore, cast=cast)
        if self._mapping is None:
            self._plans.append(plan)
        else:
            restore(plan, self._mapping)

    def blank(self) -> None:
        """Give the modules for which `build` called `restore` weights of zeros, which take no memory.

        A standby worker calls it before `rehearse`, because the real weights are set only later, by `open`.
        """
        from .restoring.plan import blank  # noqa: PLC0415

        for plan in self._plans:
            blank(plan)

    def open(self) -> None:
        """Map the files into memory and apply the plans that `build` made.

        Raises SnapshotChanged if a file was replaced or written to after it was verified.
        """
        with needs(_SUBJECT, "torch"):
            from .restoring.mapping import Mapping  # noqa: PLC0415
            from .restoring.plan import restore  # noqa: PLC0415

        if self._cache is None:
            self._mapping = Mapping(self.root, self.manifest, self._verified)
        else:
            from .caching.node import follow  # noqa: PLC0415  only remote weights need it

            lease = follow(self._cache, self.manifest, self._mounted)
            self._arrival = lease.arrival
            self._mapping = Mapping(lease.root, self.manifest, keep=lease, arrival=lease.arrival)
        for plan in self._plans:
            restore(plan, self._mapping)

    @property
    def arriving(self) -> bool:
        """True while some bytes are not fetched yet. Then operations outside a `gate` may read zeros."""
        return self._arrival is not None and not self._arrival.complete

    def gate(self) -> AbstractContextManager[Any]:
        """Return a context in which each operation of this thread waits for the bytes of its tensors."""
        if self._mapping is None or self._arrival is None or not self.arriving:
            return nullcontext()
        from .restoring.gate import Gate  # noqa: PLC0415

        return Gate(self._mapping, self._arrival)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all bytes. Raises the error of the fetch, or SourceUnavailable after `timeout_s`."""
        if self._arrival is not None and self._arrival.count:
            self._arrival.wait(0, self._arrival.count - 1, timeout_s)

    def record(self, run: Callable[[], Any]) -> Manifest:
        """Call `run`. Return a manifest with the order in which this thread first read the tensors."""
        from .restoring.touch import record_first_touch  # noqa: PLC0415

        if self._mapping is None:
            raise SnapshotError("The snapshot is not open.", remedy="Call `open` before `record`.")
        return record_first_touch(self._mapping, run)

    def __repr__(self) -> str:
        return f"Snapshot({str(self.root)!r}, {len(self.manifest.tensors)} tensors)"
