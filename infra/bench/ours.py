"""Our own engine as a contestant: fetch from the server into files on tmpfs, fresh each turn or recycled."""

from __future__ import annotations

import math
import mmap
import os
import ssl
import tempfile
import threading
from pathlib import Path
from typing import Any

import checkpoint
import xxhash
from memory_folder import SMALL_PAGES, memory_folder
from nginx import Nginx
from pilotflame.errors import Cancelled
from pilotflame.snapshot.caching.memory import has_huge_pages
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import fetch
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.source import Source
from raw_floor import file_digest

_TIMEOUT_S = 120.0


class Files:
    """A manifest's shards as files to fetch into. Recycled: every page was used and stays mapped in this process."""

    def __init__(self, manifest: Manifest, parent: Path, recycled: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=parent)
        self.folder = Path(self._folder.name)
        self.targets = [self._target(shard.name, shard.size_bytes, recycled) for shard in manifest.shards]

    def _target(self, name: str, size_bytes: int, recycled: bool) -> ShardTarget:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, size_bytes)
        if not recycled and not has_huge_pages(self.folder):
            return ShardTarget(name, descriptor)
        view = memoryview(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED))
        if not recycled:
            return ShardTarget(name, descriptor, view, fresh=True)
        for offset in range(0, size_bytes, mmap.PAGESIZE):
            view[offset] = 1
        return ShardTarget(name, descriptor, view)

    def close(self) -> None:
        for target in self.targets:
            os.close(target.descriptor)
        self.targets = []
        self._folder.cleanup()


class Ours:
    """A lane's contestant. Arguments of `run` turn on verification and the loading of tensors."""

    def __init__(
        self,
        url: str,
        manifest: str,
        digest: str,
        recycled: bool = False,
        disk: bool = False,
        small: bool = False,
        authority: str = "",
        tensors: bool = False,
    ) -> None:
        self._context = ssl.create_default_context(cafile=authority) if authority else None
        self._url, self._digest = url, digest
        self._path, self._manifest = Path(manifest), Manifest.read(Path(manifest))
        # /tmp may be a tmpfs; the build folder is where the checkout is, on a disk.
        memory = SMALL_PAGES if small else memory_folder()
        self._parent = checkpoint.DATA if disk else memory
        self._kept = Files(self._manifest, memory, recycled=True) if recycled else None
        self._files = self._kept
        self.tensors: dict[str, Any] = {}
        if tensors:
            import torch  # noqa: F401, PLC0415

    def run(
        self,
        verify: bool = True,
        tensors: bool = False,
        connections: int | None = None,
        part_bytes: int | None = None,
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """`limit_s`: give up then, and say that it took for ever."""
        manifest = Manifest.read(self._path) if tensors else self._manifest
        if self._kept is None:
            self._files = Files(manifest, self._parent)
        assert self._files is not None
        cancelled = threading.Event()
        timer = threading.Timer(limit_s, cancelled.set) if limit_s is not None else None
        if timer is not None:
            timer.start()
        try:
            stats = fetch(
                manifest,
                source_of(self._url, self._context),
                self._files.targets,
                Arrival(manifest),
                connections=connections,
                part_bytes=part_bytes,
                verify=verify,
                cancelled=cancelled,
            )
        except Cancelled:
            return {"seconds": math.inf}
        finally:
            if timer is not None:
                timer.cancel()
        if tensors:
            self.tensors = all_tensors(self._files.folder, manifest)
        return {"connections": stats.connections, "retries": stats.retries, "stalls": stats.stalls}

    def check(self) -> None:
        assert self._files is not None
        names = [shard.name for shard in self._manifest.shards]
        if [file_digest(self._files.folder / name) for name in names] != [self._digest]:
            raise RuntimeError("the bytes are not the file's")

    def clear(self) -> None:
        self.tensors = {}
        if self._kept is None and self._files is not None:
            self._files.close()


class Cached:
    """The whole of it, as a user has it: through the node's cache, to tensors. The pages of what was evicted are kept
    as spare files for the next, or not."""

    def __init__(
        self, url: str, manifest: str, digest: str, authority: str = "", spares: bool = False
    ) -> None:
        import torch  # noqa: F401, PLC0415
        from pilotflame.snapshot.caching.cache import Cache  # noqa: PLC0415
        from pilotflame.snapshot.caching.tier import Tier  # noqa: PLC0415

        del digest, authority  # tensors are compared below
        self._url, self._path = url, Path(manifest)
        self._folder = tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=memory_folder())
        total_bytes = Manifest.read(self._path).total_bytes
        spare_bytes = 2 * total_bytes if spares else 0
        self._cache = Cache(
            [Tier(Path(self._folder.name), 3 * total_bytes, "tmpfs", spare_bytes=spare_bytes)]
        )
        self._manifest: Manifest | None = None
        self.tensors: dict[str, Any] = {}
        if spares:
            self.run()
            self.clear()

    def run(self) -> None:
        self._manifest = Manifest.read(self._path)
        with self._cache.open(self._manifest, source_of(self._url), tee=False) as lease:
            lease.wait(_TIMEOUT_S)
            self.tensors = all_tensors(lease.root, self._manifest)

    def check(self) -> None:
        import torch  # noqa: PLC0415

        digests = checkpoint.digests(self._path.parent)
        for name, tensor in self.tensors.items():
            if xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy()) != digests[name]:
                raise RuntimeError(f"{name} is not the file's")

    def clear(self) -> None:
        self.tensors = {}
        assert self._manifest is not None
        self._cache.evict(self._manifest.digest)


def source_of(url: str, context: ssl.SSLContext | None = None) -> Source:
    """The objects below `url`."""
    return HttpSource(url, ssl_context=context)


def all_tensors(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Every tensor as a view of the mapped files, as a loader would give them."""
    from pilotflame.snapshot.restoring.mapping import Mapping  # noqa: PLC0415
    from pilotflame.snapshot.restoring.place import TORCH_DTYPES  # noqa: PLC0415

    mapping = Mapping(folder, manifest)
    found = {}
    for entry in manifest.tensors:
        raw = mapping.flats[entry.shard][entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        found[entry.name] = raw.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
    return found


def given_at(url: str, data: checkpoint.Checkpoint, digest: str = "") -> dict[str, Any]:
    """Return the lane's arguments for a server whose root is the bucket."""
    return {
        "url": f"{url}/{data.shape.name}",
        "manifest": str(data.folder / checkpoint.MANIFEST),
        "digest": digest,
    }


def given(server: Nginx, data: checkpoint.Checkpoint, digest: str, tls: bool = False) -> dict[str, Any]:
    """Return the lane's arguments for an nginx whose root contains the bucket."""
    base = server.tls_url if tls else server.url
    return {
        "url": f"{base}/{checkpoint.BUCKET}/{data.shape.name}",
        "manifest": str(data.folder / checkpoint.MANIFEST),
        "digest": digest,
        "authority": str(server.authority) if tls else "",
    }
