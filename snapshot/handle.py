"""The snapshot that a handler receives as `context.snapshot`.

In `build`, which runs in the zygote without weights, `restore` only computes a plan. A worker applies the plans right
after its fork. From then on, `restore` acts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapshotError

if TYPE_CHECKING:
    import torch

    from .fetching.arrival import Arrival
    from .format.manifest import Manifest
    from .restoring.mapping import Mapping
    from .restoring.plan import Plan
    from .sources.source import ObjectInfo


class Snapshot:
    """The weights of one function on this node. `manifest` describes them."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        verified: Sequence[ObjectInfo] | None = None,
        *,
        cache: Path | None = None,
    ) -> None:
        """With `cache`, the shards are in the node's cache or arriving there, and `root` holds the assets.

        Without it, `verified` is what `FolderSource.stat` returned for the files that `open` accepts.
        """
        self.root = root
        self.manifest = manifest
        self._verified = verified
        self._cache = cache
        self._arrival: Arrival | None = None
        self._plans: list[Plan] = []
        self._mapping: Mapping | None = None

    @property
    def path(self) -> Path:
        """The folder with the assets (config.json, tokenizer) and, without a cache, the weights."""
        return self.root if self.root.is_dir() else self.root.parent

    def skeleton(self) -> AbstractContextManager[None]:
        """Create modules inside this context with weights on the meta device (no memory) and real computed buffers."""
        from .restoring.skeleton import skeleton  # noqa: PLC0415  only restoring loads torch

        return skeleton()

    def restore(
        self, module: torch.nn.Module, *, prefix: str = "", ignore: Sequence[str] = (), cast: bool = False
    ) -> None:
        """Set the module's weights to views of the mapped snapshot, private and copy-on-write.

        `prefix` is prepended to the module's names. `ignore` are patterns of tensors that the module may lack. `cast`
        copies floating-point weights to the module's dtype; without it, the dtypes must be equal. In `build`, the
        weights are set later, in each worker. Raises SnapshotMismatch, which names the tensors.
        """
        from .restoring.plan import make_plan, restore  # noqa: PLC0415

        plan = make_plan(module, self.manifest, prefix=prefix, ignore=ignore, cast=cast)
        if self._mapping is None:
            self._plans.append(plan)
        else:
            restore(plan, self._mapping)

    def blank(self) -> None:
        """Set the weights that `build` planned to zeros that take no memory: for `rehearse`, in a standby."""
        from .restoring.plan import blank  # noqa: PLC0415

        for plan in self._plans:
            blank(plan)

    def open(self) -> None:
        """Map the files and apply the plans of `build`. Raises SnapshotChanged if the files are not the verified ones."""
        from .restoring.mapping import Mapping  # noqa: PLC0415
        from .restoring.plan import restore  # noqa: PLC0415

        if self._cache is None:
            self._mapping = Mapping(self.root, self.manifest, self._verified)
        else:
            from .caching.node import follow  # noqa: PLC0415  only remote weights need it

            lease = follow(self._cache, self.manifest)
            self._arrival = lease.arrival
            self._mapping = Mapping(lease.root, self.manifest, keep=lease, arrival=lease.arrival)
        for plan in self._plans:
            restore(plan, self._mapping)

    @property
    def arriving(self) -> bool:
        """True while bytes are arriving. Operations outside a `gate` may then read zeros."""
        return self._arrival is not None and not self._arrival.complete

    def gate(self) -> AbstractContextManager[Any]:
        """Make operations inside this context, on this thread, wait for the bytes of their tensors."""
        if self._mapping is None or self._arrival is None or not self.arriving:
            return nullcontext()
        from .restoring.gate import Gate  # noqa: PLC0415

        return Gate(self._mapping, self._arrival)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all bytes have arrived. Raises the error of the fetch if it fails."""
        if self._arrival is not None and self._arrival.count:
            self._arrival.wait(0, self._arrival.count - 1, timeout_s)

    def record(self, run: Callable[[], Any]) -> Manifest:
        """Call `run`, and return the manifest with the order in which it read the tensors, on this thread."""
        from .restoring.touch import record_first_touch  # noqa: PLC0415

        if self._mapping is None:
            raise SnapshotError("The snapshot is not open.", remedy="Call `open` before `record`.")
        return record_first_touch(self._mapping, run)

    def __repr__(self) -> str:
        return f"Snapshot({str(self.root)!r}, {len(self.manifest.tensors)} tensors)"
