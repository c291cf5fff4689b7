"""A snapshot as a handler sees it: `context.snapshot`.

In `build` (the zygote, where weights must not be) `restore` computes the plan and remembers it; the worker applies
the remembered plans right after it was forked. Later `restore` acts at once.
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
    from .restoring.fingerprint import Fingerprint
    from .restoring.mapping import Mapping
    from .restoring.plan import Plan


class Snapshot:
    """The weights of one function on this node: `path` is their folder, `manifest` says what is in it."""

    def __init__(
        self, root: Path, manifest: Manifest, pin: Fingerprint | None = None, *, cache: Path | None = None
    ) -> None:
        """With `cache`, the folder of the node's cache: the shards lie there, or are on their way; `root` holds the rest."""
        self.root = root
        self.manifest = manifest
        self._pin = pin
        self._cache = cache
        self._arrival: Arrival | None = None
        self._plans: list[Plan] = []
        self._mapping: Mapping | None = None

    @property
    def path(self) -> Path:
        """The folder with the weights, and with whatever lies beside them (config.json, tokenizer)."""
        return self.root if self.root.is_dir() else self.root.parent

    def skeleton(self) -> AbstractContextManager[None]:
        """Modules made inside have their weights on the meta device (no memory) and their computed buffers real."""
        from .restoring.skeleton import skeleton  # noqa: PLC0415  torch is loaded only by those who restore

        return skeleton()

    def restore(
        self,
        module: torch.nn.Module,
        *,
        prefix: str = "",
        ignore: Sequence[str] = (),
        cast: bool = False,
    ) -> None:
        """Gives `module` its weights as views of the mapped snapshot, private and copy-on-write.

        `prefix` is prepended to the module's names, `ignore` are patterns of tensors the module need not have. `cast`
        converts floating-point weights to the module's type, at the cost of a copy; without it they have to be of that type.
        In `build` the weights come later, in each worker. Raises SnapshotMismatch naming the tensors.
        """
        from .restoring.plan import make_plan, restore  # noqa: PLC0415

        plan = make_plan(module, self.manifest, prefix=prefix, ignore=ignore, cast=cast)
        if self._mapping is None:
            self._plans.append(plan)
        else:
            restore(plan, self._mapping)

    def blank(self) -> None:
        """Gives what `build` planned weights of zeros that hold no memory: for `rehearse`, in a standby."""
        from .restoring.plan import blank  # noqa: PLC0415

        for plan in self._plans:
            blank(plan)

    def open(self) -> None:
        """Maps the files and applies what `build` planned. Raises SnapshotChanged if the files are not the ones pinned."""
        from .restoring.mapping import Mapping  # noqa: PLC0415
        from .restoring.plan import restore  # noqa: PLC0415

        if self._cache is None:
            self._mapping = Mapping(self.root, self.manifest, self._pin)
        else:
            from .caching.node import follow  # noqa: PLC0415  only functions whose weights lie elsewhere pay for it

            lease = follow(self._cache, self.manifest)
            self._arrival = lease.arrival
            self._mapping = Mapping(lease.root, self.manifest, keep=lease, arrival=lease.arrival)
        for plan in self._plans:
            restore(plan, self._mapping)

    @property
    def arriving(self) -> bool:
        """Whether bytes are still to come; operations outside a `gate` may then read zeros."""
        return self._arrival is not None and not self._arrival.complete

    def gate(self) -> AbstractContextManager[Any]:
        """Operations inside, on this thread, wait for the bytes of their own tensors. Nothing, once all are there."""
        if self._mapping is None or self._arrival is None or not self.arriving:
            return nullcontext()
        from .restoring.gate import Gate  # noqa: PLC0415

        return Gate(self._mapping, self._arrival)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all bytes are there; raises what kept them from coming."""
        if self._arrival is not None and self._arrival.count:
            self._arrival.wait(0, self._arrival.count - 1, timeout_s)

    def record(self, run: Callable[[], Any]) -> Manifest:
        """Calls `run` and gives the manifest with the order in which it touched the tensors, on this thread."""
        from .restoring.touch import record_first_touch  # noqa: PLC0415

        if self._mapping is None:
            raise SnapshotError("The snapshot is not open.", remedy="Record after `open`.")
        return record_first_touch(self._mapping, run)

    def __repr__(self) -> str:
        return f"Snapshot({str(self.root)!r}, {len(self.manifest.tensors)} tensors)"
