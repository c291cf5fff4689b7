"""The checkpoint of the snapshot benchmark: a llama of random bf16 weights, made once and kept in build/bench/data.

Random bits cannot be compressed, guessed or skipped on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pilotflame.snapshot.format.create import create

DATA = Path(__file__).resolve().parents[2] / "build" / "bench" / "data"
BUCKET = "bucket"
"""The folder that S3 clients use as a bucket."""
SAFETENSORS = "model.safetensors"
MANIFEST = "pilotflame.manifest.json"
VOCABULARY = 32_000
# The width of the queries divided by the width of the keys and values.
KV_SHARE = 8
_PIECE = 4 << 20
# Without the highest bit of the exponent, every bf16 is finite, and its magnitude is below 2.
_FINITE = 0xBFFF


@dataclass(frozen=True)
class Shape:
    """The dimensions of a llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes in the order in which a forward pass touches them."""
        wide, narrow = self.hidden, self.hidden // KV_SHARE
        yield "model.embed_tokens.weight", (VOCABULARY, wide)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (wide,)
            yield prefix + "self_attn.q_proj.weight", (wide, wide)
            yield prefix + "self_attn.k_proj.weight", (narrow, wide)
            yield prefix + "self_attn.v_proj.weight", (narrow, wide)
            yield prefix + "self_attn.o_proj.weight", (wide, wide)
            yield prefix + "post_attention_layernorm.weight", (wide,)
            yield prefix + "mlp.gate_proj.weight", (self.intermediate, wide)
            yield prefix + "mlp.up_proj.weight", (self.intermediate, wide)
            yield prefix + "mlp.down_proj.weight", (wide, self.intermediate)
        yield "model.norm.weight", (wide,)
        yield "lm_head.weight", (VOCABULARY, wide)


FULL = Shape("llama-1.1gb", hidden=2048, intermediate=5376, layers=10)
QUICK = Shape("llama-100mb", hidden=512, intermediate=1408, layers=6)


@dataclass(frozen=True)
class Checkpoint:
    """The files of one shape, in a folder that a server serves as a bucket."""

    shape: Shape
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / SAFETENSORS

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def key(self) -> str:
        """The object's key in the bucket."""
        return f"{self.shape.name}/{SAFETENSORS}"


def checkpoint(shape: Shape) -> Checkpoint:
    """Return the checkpoint of this shape. Make it if it does not exist."""
    made = Checkpoint(shape, DATA / BUCKET / shape.name)
    if not (made.folder / MANIFEST).exists():
        made.folder.mkdir(parents=True, exist_ok=True)
        write(made.path, shape)
        create(made.folder).write(made.folder / MANIFEST)
    return made


def write(path: Path, shape: Shape) -> None:
    """Write the safetensors file in pieces, so that memory stays small."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dimensions in shape.tensors():
        size = 2 * prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors begin on page boundaries.
    text += b" " * (-(len(text) + 8) % 4096)
    generator = np.random.default_rng(7)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, offset, _PIECE):
            count = min(_PIECE, offset - begin) // 2
            file.write((generator.integers(0, 1 << 16, count, dtype=np.uint16) & _FINITE).tobytes())


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
    return digest.hexdigest()
