"""Side by side: how long an adapter takes to arrive while its base model does, over a link that they share.

    python infra/bench/beside.py [--quick] [--rounds N]

A function with both snapshots fetches them at the same time. The server sends as many bytes a second as a
bucket may, to all connections together. The adapter has 2 % of the bytes. If both had half of the link, the
adapter would take twice as long as alone, and the base model longer by the adapter's bytes; behind the base
model, it would take 50 times as long.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoint
import numpy as np
from delta import fault_server
from memory_folder import memory_folder, mounted
from percentiles import median
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.locate import open_source
from report import Report
from safetensors.numpy import save_file

HELD_BYTES_S = 200e6
ADAPTER_SHARE = 0.02
_TIMEOUT_S = 300.0
_BASE, _ADAPTER = "base", "adapter"


@contextmanager
def bucket(data: checkpoint.Checkpoint) -> Iterator[tuple[Path, dict[str, Manifest]]]:
    """The folder of a server with a base model and an adapter, and their manifests."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=checkpoint.DATA) as name:
        folder = Path(name)
        (folder / _BASE).symlink_to(data.folder)
        (folder / _ADAPTER).mkdir()
        base = Manifest.read(data.folder / checkpoint.MANIFEST)
        count = int(base.total_bytes * ADAPTER_SHARE) // 32
        generator = np.random.default_rng(7)
        tensors = {f"lora.{number}": generator.integers(0, 255, count, np.uint8) for number in range(32)}
        save_file(tensors, folder / _ADAPTER / checkpoint.SAFETENSORS)
        yield folder, {_BASE: base, _ADAPTER: create(folder / _ADAPTER)}


class Fetching:
    """Fetches snapshots into an empty cache, each in a thread of its own, as the fetcher does."""

    def __init__(self, server: Any, manifests: dict[str, Manifest]) -> None:
        self._server, self._manifests = server, manifests

    def seconds(self, *names: str) -> dict[str, float]:
        """Fetch them at the same time. Return when each had arrived."""
        took: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=memory_folder()) as folder:
            cache = Cache([Tier(Path(folder), 4 * self._manifests[_BASE].total_bytes, "tmpfs")])
            started_s = time.monotonic()

            def fetch(name: str) -> None:
                source = open_source(f"{self._server.url}/{name}")
                with cache.open(self._manifests[name], source) as lease:
                    lease.wait(_TIMEOUT_S)
                    took[name] = time.monotonic() - started_s

            threads = [threading.Thread(target=fetch, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return took


def measure(report: Report, data: checkpoint.Checkpoint, rounds: int) -> None:
    """Enters adapter_beside_base_ratio and base_beside_adapter_ratio."""
    adapter, base = list[float](), list[float]()
    with bucket(data) as (served, manifests), fault_server(served, HELD_BYTES_S) as server:
        fetching = Fetching(server, manifests)
        # The first round learns how many connections the server likes, and counts nothing.
        for number in range(rounds + 1):
            alone = fetching.seconds(_ADAPTER) | fetching.seconds(_BASE)
            both = fetching.seconds(_BASE, _ADAPTER)
            if number:
                adapter.append(both[_ADAPTER] / alone[_ADAPTER])
                base.append(both[_BASE] / alone[_BASE])
            report.row(group="beside", round=number, adapter_alone_s=alone[_ADAPTER], adapter_s=both[_ADAPTER], base_alone_s=alone[_BASE], base_s=both[_BASE])  # fmt: skip
    report.add("adapter_beside_base_ratio", median(adapter), "of alone")
    report.add("base_beside_adapter_ratio", median(base), "of alone")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a fetch beside a larger one.")
    parser.add_argument("--quick", action="store_true", help="100 MB in place of 1.1 GB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    report = Report("bench-beside")
    with mounted():
        data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
        measure(report, data, arguments.rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
