"""Recording in which order a forward pass first touches the tensors, so that they can be fetched in that order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..format.manifest import Manifest
from .mapping import Mapping
from .touch import Touched


def record_first_touch(mapping: Mapping, run: Callable[[], Any]) -> Manifest:
    """Call `run`, which uses modules restored from `mapping` on a sample input; returns the manifest with the order.

    The digest of the manifest stays: the order is a hint. Tensors that `run` does not touch are not named.
    """
    recorder = _Recorder(mapping)
    with recorder:
        run()
    return mapping.manifest.model_copy(update={"first_touch": tuple(recorder.order)})


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mapping: Mapping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: dict[str, None] = {}
        self._touched = Touched(mapping)
        placed = sorted(
            (tensor.shard, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes, tensor.name)
            for tensor in mapping.manifest.tensors
            if tensor.size_bytes
        )
        self._begins = [(shard, begin) for shard, begin, _, _ in placed]
        self._placed = placed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for shard, begin, end in self._touched.extents(func, args, kwargs):
            self._note(shard, begin, end)
        return func(*args, **kwargs)

    def _note(self, shard: int, begin: int, end: int) -> None:
        index = max(0, bisect_right(self._begins, (shard, begin)) - 1)
        for other, low, high, name in self._placed[index:]:
            if (other, low) >= (shard, end):
                break
            if other == shard and high > begin:
                self.order.setdefault(name)
