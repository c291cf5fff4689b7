"""Ten thousand random corruptions of a snapshot on disk are each found, in the right file and chunk."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotCorrupt
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.digests import AlgorithmName
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from safetensors.torch import save_file

COUNT = 10_000
CHUNK = 8192
SEED = 20250


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory if /dev/shm is writable, otherwise on the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def make(root: Path, algorithm: AlgorithmName) -> Manifest:
    generator = torch.Generator().manual_seed(SEED)
    places = {}
    for shard, count in enumerate((60_000, 1, 33_333, 9_000)):
        name = f"model-{shard}.safetensors"
        tensors = {f"{shard}.w": torch.rand(count, generator=generator), f"{shard}.zeros": torch.zeros(3000)}
        places |= dict.fromkeys(tensors, name)
        save_file(tensors, root / name)
    index = str({"weight_map": places}).replace("'", '"')
    (root / "model.safetensors.index.json").write_text(index)
    (root / "tokenizer.json").write_bytes(bytes(range(256)) * 20)
    return create(root, chunk_bytes=CHUNK, algorithm=algorithm)


def damaged(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return the kind of damage, and the damaged content, which may equal the old one."""
    kind = draw.choice(["flip", "run", "swap", "cut", "longer", "zeros"])
    size = len(content)
    begin = draw.randrange(size)
    length = min(draw.choice([1, 7, 512, CHUNK, 3 * CHUNK]), size - begin)
    text = bytearray(content)
    if kind == "flip":
        text[begin] ^= 1 << draw.randrange(8)
    elif kind == "run":
        text[begin : begin + length] = draw.randbytes(length)
    elif kind == "swap":
        other = draw.randrange(size)
        begin, other = sorted((begin, other))
        length = min(length, other - begin, size - other)
        text[begin : begin + length] = content[other : other + length]
        text[other : other + length] = content[begin : begin + length]
    elif kind == "cut":
        del text[begin:]
    elif kind == "longer":
        text += draw.randbytes(length)
    else:
        text[begin : begin + length] = bytes(length)
    return kind, bytes(text)


def first_difference(one: bytes, two: bytes) -> int:
    """Return the offset of the first byte that differs in two files of the same length."""
    begin, end = 0, len(one)
    while end - begin > 1:
        middle = (begin + end) // 2
        begin, end = (begin, middle) if one[begin:middle] != two[begin:middle] else (middle, end)
    return begin


def place(name: str, before: bytes, after: bytes, is_shard: bool) -> dict[str, object]:
    """Return the details that the error must have."""
    if not is_shard:
        return {"asset": name}
    if len(after) > len(before):
        return {"shard": name, "chunk": None}
    at = len(after) if len(after) < len(before) else first_difference(before, after)
    return {"shard": name, "chunk": at // CHUNK}


@pytest.mark.parametrize(("algorithm", "count"), [("xxh3-128", COUNT), ("sha256", COUNT // 10)])
def test_ten_thousand_corruptions_are_found_ten_thousand_times(
    root: Path, algorithm: AlgorithmName, count: int
) -> None:
    manifest = make(root, algorithm)
    verify(root, manifest)
    contents = {file.name: (root / file.name).read_bytes() for file in manifest.files}
    shards = {shard.name for shard in manifest.shards}
    draw = random.Random(SEED)
    # Large files are damaged more often, in proportion to their size. The constant is for the small files.
    names = draw.choices(list(contents), [len(text) + 20_000 for text in contents.values()], k=2 * count)
    kinds: Counter[str] = Counter()
    found = named = 0
    for name in names:
        if found == count:
            break
        kind, text = damaged(contents[name], draw)
        if text == contents[name]:
            # Zeros over zeros are no damage.
            continue
        path = root / name
        path.write_bytes(text)
        with pytest.raises(SnapshotCorrupt) as caught:
            verify(root, manifest)
        path.write_bytes(contents[name])
        found += 1
        kinds[kind] += 1
        named += caught.value.details.items() >= place(name, contents[name], text, name in shards).items()
    assert (found, named) == (count, count)
    assert set(kinds) == {"flip", "run", "swap", "cut", "longer", "zeros"}
    assert min(kinds.values()) > count // 20
    verify(root, manifest)
