"""Our engine as a subject: it fetches a snapshot from a server into files in memory, fresh in each turn or kept."""

from __future__ import annotations

import mmap
import os
import ssl
import tempfile
from pathlib import Path

from checkpoint import file_digest
from memory_folder import memory_folder
from pilotflame.snapshot.caching.memory import has_huge_pages
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import fetch
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.digests import XXH3
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.http import HttpSource


class Files:
    """The shards of a manifest as files to fetch into. If `kept`, every page was used and stays mapped in this process."""

    def __init__(self, manifest: Manifest, kept: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=memory_folder())
        self.folder = Path(self._folder.name)
        self.targets = [self._target(shard.name, shard.size_bytes, kept) for shard in manifest.shards]

    def _target(self, name: str, size_bytes: int, kept: bool) -> ShardTarget:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, size_bytes)
        if not kept and not has_huge_pages(self.folder):
            return ShardTarget(name, descriptor, XXH3)
        view = memoryview(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED))
        if not kept:
            return ShardTarget(name, descriptor, XXH3, view, fresh=True)
        for offset in range(0, size_bytes, mmap.PAGESIZE):
            view[offset] = 1
        return ShardTarget(name, descriptor, XXH3, view)

    def close(self) -> None:
        for target in self.targets:
            os.close(target.descriptor)
        self.targets = []
        self._folder.cleanup()


class Ours:
    """Our engine, as the subject of a comparison."""

    def __init__(self, url: str, manifest: str, digest: str, kept: bool, authority: str = "") -> None:
        self._context = ssl.create_default_context(cafile=authority) if authority else None
        self._url, self._digest = url, digest
        self._manifest = Manifest.read(Path(manifest))
        self._kept = Files(self._manifest, kept=True) if kept else None
        self._files = self._kept

    def run(self, verify: bool = True) -> None:
        if self._kept is None:
            self._files = Files(self._manifest, kept=False)
        assert self._files is not None
        source = HttpSource(self._url, ssl_context=self._context)
        fetch(self._manifest, source, self._files.targets, Arrival(self._manifest), verify=verify)

    def check(self) -> None:
        assert self._files is not None
        digests = [file_digest(self._files.folder / shard.name) for shard in self._manifest.shards]
        if digests != [self._digest]:
            raise RuntimeError("the bytes differ from the file")

    def clear(self) -> None:
        if self._kept is None and self._files is not None:
            self._files.close()
            self._files = None
