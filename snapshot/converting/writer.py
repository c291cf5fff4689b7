"""Writes safetensors files, with one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from ...errors import SnapshotError
from ..format.dtypes import DTYPES
from ..format.header import LENGTH_BYTES
from ..publish import publish
from .origin import TORCH_DTYPES, TensorOrigin, TensorSpec, grouped, raw

# The data of a file starts at a multiple of this number, which is the size of the largest element type.
ALIGNMENT_BYTES = 8
WRITE_BYTES = 16 << 20

CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# 8-bit floats are not cast, because they mean nothing without their scales, which are separate tensors.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

Wrote = Callable[[int], None]


def write_shards(
    folder: Path, origin: TensorOrigin, *, shard_bytes: int, cast: str | None = None, wrote: Wrote
) -> None:
    """Write all tensors to model.safetensors or, if they have over `shard_bytes`, to several files and an index.

    `cast` is the safetensors name of the dtype that floating-point tensors are cast to. `write_shards` calls `wrote`
    after each write, with the number of bytes.
    """
    written = [replace(spec, dtype=cast) if cast and spec.dtype in _FLOATS else spec for spec in origin.specs]
    # Put tensors with larger elements first, so that every tensor starts at a multiple of its element size.
    groups = grouped(written, shard_bytes)
    plan = [sorted(group, key=lambda spec: -DTYPES[spec.dtype].bits) for group in groups]
    names = [
        "model.safetensors" if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        for number in range(1, len(plan) + 1)
    ]
    for name, specs in zip(names, plan, strict=True):
        held = {spec.name for spec in specs}
        metadata = {alias: target for alias, target in origin.aliases.items() if target in held}
        with publish(folder / name) as stream:
            header = _header(specs, metadata)
            stream.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
            tensors = origin.tensors([spec.name for spec in specs])
            for spec in specs:
                # Do not assign the tensor to a variable: it would stay in memory while the next tensor is read.
                _write(stream, spec, next(tensors), wrote)
    if len(plan) > 1:
        places = {spec.name: name for name, specs in zip(names, plan, strict=True) for spec in specs}
        total_bytes = sum(spec.size_bytes for specs in plan for spec in specs)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
        with publish(folder / "model.safetensors.index.json") as stream:
            stream.write(json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")


def _write(stream: IO[bytes], spec: TensorSpec, tensor: torch.Tensor, wrote: Wrote) -> None:
    tensor = _cast(tensor, spec)
    if tuple(tensor.shape) != spec.torch_shape:
        raise SnapshotError(
            f"Tensor {spec.name!r} has shape {tuple(tensor.shape)}, {spec.torch_shape} expected."
        )
    view = raw(tensor)
    for begin in range(0, len(view), WRITE_BYTES):
        wrote(stream.write(view[begin : begin + WRITE_BYTES]))


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end_bytes = 0
    for spec in specs:
        begin_bytes, end_bytes = end_bytes, end_bytes + spec.size_bytes
        offsets = [begin_bytes, end_bytes]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)


def _cast(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    if tensor.dtype is dtype:
        return tensor
    cast = tensor.to(dtype)
    infinite = cast.isinf()
    if bool(infinite.any()) and not bool(tensor[infinite].isinf().all()):
        fault = f"Tensor {spec.name!r} holds numbers too large for {spec.dtype}."
        raise SnapshotError(fault, remedy="Convert to bf16, or keep the dtypes.")
    return cast
