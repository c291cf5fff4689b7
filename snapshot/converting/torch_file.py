"""Reads the tensors in files of torch.save, without running code that such a file contains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import SnapshotError
from .origin import DTYPE_NAMES, TensorSpec, check_names, first_line, open_weights

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt"})

# Training scripts often save a dict that has the state dict under one of these keys. Such dicts may be nested. At most
# _MAX_WRAPPED of them are opened.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_MAX_WRAPPED = 4
_SAVE = "Save tensors only: torch.save(model.state_dict(), path)."
_ZIP = b"PK\x03\x04"
# Tensors may be views that repeat their storage (`expand`). To keep a file of a kilobyte from becoming a terabyte, the
# tensors of a file may have at most _MAX_GROWTH times the bytes of its storages, plus _FREE_GROWTH_BYTES.
_MAX_GROWTH = 4
_FREE_GROWTH_BYTES = 64 << 20


class TorchOrigin:
    """The tensors in the state dicts of one or more files of torch.save.

    Files of torch 1.6 and later are mapped into memory. Older files are read whole. If several tensors are the same
    view of the same bytes (tied weights), the first becomes a tensor and the others become aliases. If a file holds a
    dict such as {"state_dict": …, "epoch": 3}, only the state dict in it is used.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        for path in paths:
            self._take(path, _state_dict(path, _load(path)))
        where = str(paths[0]) if len(paths) == 1 else str(paths[0].parent)
        check_names(where, [*self._tensors, *self.aliases])
        self.specs = [TensorSpec.of(name, tensor) for name, tensor in self._tensors.items()]

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            yield _contiguous(self._tensors[name].detach().resolve_conj().resolve_neg())

    def _take(self, path: Path, state: dict[str, torch.Tensor]) -> None:
        seen: dict[tuple[Any, ...], str] = {}
        storages: dict[int, int] = {}
        taken_bytes = 0
        for name, tensor in state.items():
            if name in self._tensors or name in self.aliases:
                fault = f"{path} holds {name[:80]!r}, as another file does."
                raise SnapshotError(fault, remedy="Save it again.")
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            place = (storage.data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
            flipped = tensor.is_conj() or tensor.is_neg()
            first = name if flipped or not tensor.numel() else seen.setdefault(place, name)
            # Make no alias of the name "format": an alias is written as a key of the safetensors metadata, where this key has
            # another meaning.
            if name not in (first, "format"):
                self.aliases[name] = first
                continue
            self._tensors[name] = tensor
            taken_bytes += tensor.numel() * tensor.element_size()
        stored_bytes = sum(storages.values())
        if taken_bytes > _MAX_GROWTH * stored_bytes + _FREE_GROWTH_BYTES:
            fault = f"{path} holds {stored_bytes} bytes that its tensors repeat to {taken_bytes}."
            raise SnapshotError(fault, remedy="Save the tensors without expanding them.")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    # torch cannot copy a tensor with two elements in a byte (float4_e2m1fn_x2), but it can copy the tensor's bytes.
    if tensor.itemsize == 1 and not tensor.is_contiguous():
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


def _load(path: Path) -> Any:
    with open_weights(path) as stream:
        mapped = stream.read(len(_ZIP)) == _ZIP
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        # Catch every Exception, because a broken or hostile pickle may raise any class.
        fault = f"{path} is not a file of torch.save that can be read safely: {first_line(error)}."
        remedy = "Fetch it again, or save the state dict again with torch.save."
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            fault = f"{path} holds code, not only weights: loading it would call {named[1][:100]}. It was not run."
            remedy = "If you trust it, load it, save model.state_dict() with torch.save, and convert that."
        raise SnapshotError(fault, remedy=remedy) from error


def _state_dict(path: Path, loaded: Any) -> dict[str, torch.Tensor]:
    state, prefix = loaded, ""
    if not isinstance(state, Mapping):
        raise SnapshotError(f"{path} holds a {type(state).__name__}, not a dict of tensors.", remedy=_SAVE)
    for _ in range(_MAX_WRAPPED):
        inner = next((key for key in _WRAPPERS if _is_state(state.get(key))), None)
        if inner is None:
            break
        state, prefix = state[inner], f"{prefix}{inner}."
    for key, value in state.items():
        fault = "its key is not text" if not isinstance(key, str) else _fault(value)
        if fault is not None:
            raise SnapshotError(f"{path}, {(prefix + str(key))[:200]!r}: {fault}.", remedy=_SAVE)
    return dict(state)


def _is_state(value: Any) -> bool:
    kinds = (torch.Tensor, Mapping)
    return isinstance(value, Mapping) and any(isinstance(inner, kinds) for inner in value.values())


def _fault(value: Any) -> str | None:
    """Return why `value` cannot be stored in a safetensors file, or None if it can."""
    if not isinstance(value, torch.Tensor):
        return f"it is a {type(value).__name__}, not a tensor"
    if value.layout is not torch.strided or value.is_quantized:
        return "it is a sparse or quantized tensor, which safetensors does not hold"
    if value.device.type != "cpu":
        return f"it is on {value.device}, without its values"
    if value.dtype not in DTYPE_NAMES:
        return f"safetensors does not hold {value.dtype}"
    return None
