"""Which digest for a chunk: each over pieces that have just been written (in the cache) and over cold memory.

python infra/bench/hashes.py
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import checkpoint
import numpy as np
import xxhash
from awscrt import checksums
from percentiles import median
from rich.console import Console
from rich.table import Table

RESULT = checkpoint.DATA.parent / "hashes.json"
HOT_BYTES = 512 << 10  # what is received at once
COLD_BYTES = 256 << 20  # beyond every cache
CHUNK_BYTES = 8 << 20
ROUNDS = 7

HASHES: dict[str, tuple[int, Callable[[Any], object]]] = {
    "xxh3-128": (128, xxhash.xxh3_128_digest),
    "xxh3-64": (64, xxhash.xxh3_64_digest),
    "xxh64": (64, xxhash.xxh64_digest),
    "crc32 (zlib)": (32, zlib.crc32),
    "crc32c (awscrt)": (32, checksums.crc32c),
    "crc64nvme (awscrt)": (64, checksums.crc64nvme),
    "sha256": (256, lambda data: hashlib.sha256(data).digest()),
    "blake2b": (512, lambda data: hashlib.blake2b(data).digest()),
}


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """GB/s (10^9) on one core, medians; the hashes take turns in each round."""
    memory = np.random.default_rng(3).integers(0, 256, COLD_BYTES, dtype=np.uint8).tobytes()
    cold = [memory[begin : begin + CHUNK_BYTES] for begin in range(0, COLD_BYTES, CHUNK_BYTES)]
    hot = memory[:HOT_BYTES]
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, (_, digest) in HASHES.items():
            for _ in range(3):
                digest(hot)
            seconds.setdefault((name, "hot"), []).append(_seconds(digest, [hot] * 32) / 32 / HOT_BYTES)
            slow = name in {"sha256", "blake2b"}
            pieces = cold[: len(cold) // 4] if slow else cold
            seconds.setdefault((name, "cold"), []).append(
                _seconds(digest, pieces) / len(pieces) / CHUNK_BYTES
            )
    return [
        {
            "hash": name,
            "bits": bits,
            "hot_gb_s": round(1e-9 / median(seconds[name, "hot"]), 2),
            "cold_gb_s": round(1e-9 / median(seconds[name, "cold"]), 2),
        }
        for name, (bits, _) in HASHES.items()
    ]


def _seconds(digest: Callable[[Any], object], pieces: list[bytes]) -> float:
    started_ns = time.perf_counter_ns()
    for piece in pieces:
        digest(piece)
    return (time.perf_counter_ns() - started_ns) / 1e9


def main() -> int:
    rows = measure()
    table = Table(title="digests, one core", title_justify="left")
    for column in ("hash", "bits", "GB/s, 512 KiB just received", "GB/s, 8 MiB from memory"):
        table.add_column(column, justify="left" if column == "hash" else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    Console().print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
