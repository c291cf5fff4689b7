"""The checkpoint of the snapshot benchmark: llama-shaped, bf16, made once and kept in build/bench/data.

    python infra/bench/checkpoint.py [--quick]

Random bits that are finite bf16, so that nothing on the way can be compressed, guessed or skipped; written by
streaming, so that memory stays small. Beside it the same tensors as the contestants want them, and their digests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

DATA = Path(__file__).resolve().parents[2] / "build" / "bench" / "data"
BUCKET = "bucket"  # the folder that S3 clients take for a bucket, path style
SAFETENSORS = "model.safetensors"
TENSORIZER = "model.tensors"
TORCH = "model.pt"
MANIFEST = "pilotflame.manifest.json"
_DIGESTS = "digests.json"
_PIECE = 4 << 20
_FINITE = 0xBFFF  # without the exponent's top bit every bf16 is finite, its magnitude below 2


@dataclass(frozen=True)
class Shape:
    """The dimensions of a llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    kv_share: int = 8
    """Grouped-query attention: the width of the queries divided by the width of the keys and values."""
    vocabulary: int = 32_000

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order in which a forward pass touches them."""
        wide, narrow = self.hidden, self.hidden // self.kv_share
        yield "model.embed_tokens.weight", (self.vocabulary, wide)
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
        yield "lm_head.weight", (self.vocabulary, wide)

    @property
    def data_bytes(self) -> int:
        return sum(2 * prod(shape) for _, shape in self.tensors())


FULL = Shape("llama-1.1gb", hidden=2048, intermediate=5376, layers=10)
QUICK = Shape("llama-100mb", hidden=512, intermediate=1408, layers=6)
TOY = Shape("toy-24-layers-323mb", hidden=768, intermediate=2112, layers=24, vocabulary=8000)
GIANT = Shape("llama-6gb", hidden=4096, intermediate=14_336, layers=13)


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

    def key_of(self, name: str) -> str:
        return f"{self.shape.name}/{name}"

    def ranges(self) -> list[tuple[str, int, int]]:
        """Name, first and past-the-end byte of every tensor, from the file's own header."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        return [
            (name, 8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in header.items()
        ]

    def digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor's bytes."""
        return digests(self.folder)


def digests(folder: Path) -> dict[str, str]:
    """xxh3-128 of every tensor of the checkpoint in `folder`."""
    found: dict[str, str] = json.loads((folder / _DIGESTS).read_text())
    return found


def checkpoint(shape: Shape) -> Checkpoint:
    """The checkpoint of this shape with all its formats; made if it is not there yet."""
    found = Checkpoint(shape, DATA / BUCKET / shape.name)
    if not (found.folder / _DIGESTS).exists():
        print(f"making {shape.name} ({shape.data_bytes / 1e9:.2f} GB, three formats) in {found.folder}")
        # In a child process, so that the benchmark's process does not keep memory of torch and tensorizer.
        subprocess.run([sys.executable, __file__, "--make", shape.name], check=True, timeout=600)
    return found


def snapshot(shape: Shape, bucket: Path, *, sparse: bool = False) -> Checkpoint:
    """The safetensors and the manifest alone, in this bucket; made if they are not there yet."""
    made = Checkpoint(shape, bucket / shape.name)
    if not (made.folder / MANIFEST).exists():
        made.folder.mkdir(parents=True, exist_ok=True)
        write(made.path, shape, sparse=sparse)
        _describe(made)
    return made


def write(path: Path, shape: Shape, *, sparse: bool = False) -> None:
    """The safetensors file: random bits, or (sparse) a hole with a few bytes at the head of every tensor."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dimensions in shape.tensors():
        size = 2 * prod(dimensions)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)  # tensors on page boundaries, where a mapping likes them
    generator = np.random.default_rng(7)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            _write_marks(file.fileno(), 8 + len(text), offset, generator)
        else:
            for begin in range(0, offset, _PIECE):
                file.write(_noise(generator, min(_PIECE, offset - begin)))


def _write_marks(descriptor: int, begin: int, size: int, generator: np.random.Generator) -> None:
    # One page in each MiB: enough that no chunk is all zeros and that no two are equal.
    os.ftruncate(descriptor, begin + size)
    for offset in range(begin, begin + size - 64, 1 << 20):
        os.pwrite(descriptor, _noise(generator, 64), offset)


def _noise(generator: np.random.Generator, size: int) -> bytes:
    return (generator.integers(0, 1 << 16, size // 2, dtype=np.uint16) & _FINITE).tobytes()


def _describe(made: Checkpoint) -> None:
    from pilotflame.snapshot.format.create import create  # noqa: PLC0415

    manifest = create(made.folder)
    first_touch = tuple(name for name, _ in made.shape.tensors())
    manifest.build(**{**dict(manifest), "first_touch": first_touch}).write(made.folder / MANIFEST)


def _make(shape: Shape) -> None:
    made = snapshot(shape, DATA / BUCKET)
    _convert(made)
    found = {}
    with made.path.open("rb") as file:
        for name, begin, end in made.ranges():
            file.seek(begin)
            found[name] = xxhash.xxh3_128_hexdigest(file.read(end - begin))
    (made.folder / _DIGESTS).write_text(json.dumps(found))  # last: marks the checkpoint as complete


def _convert(made: Checkpoint) -> None:
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415
    from tensorizer import TensorSerializer  # noqa: PLC0415

    state = load_file(made.path)
    serializer = TensorSerializer(str(made.folder / TENSORIZER))
    serializer.write_state_dict(state)
    serializer.close()
    torch.save(state, made.folder / TORCH)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the checkpoint of the snapshot benchmark.")
    parser.add_argument("--quick", action="store_true", help="100 MB in place of 1.1 GB")
    parser.add_argument("--make", choices=[FULL.name, QUICK.name], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        _make(FULL if arguments.make == FULL.name else QUICK)
        return
    made = checkpoint(QUICK if arguments.quick else FULL)
    for file in sorted(made.folder.iterdir()):
        print(f"{file.stat().st_size / 1e6:10.1f} MB  {file.name}")


if __name__ == "__main__":
    main()
