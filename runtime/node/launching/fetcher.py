"""Fetches snapshots into the node's cache, in one process per gateway, and protects them from eviction.

Workers have no credentials of object storage: they read the files that the fetcher writes. Requests are lines
of JSON on standard input. Events are lines of JSON on standard output:

    {"op": "hold", "id": 1, "manifest": path, "url": "s3://..."}     fetch if needed; keep until released
                                                "timeout_s": n seconds are the limit of the fetch;
                                                with "copied": true, "done" comes when the snapshot is also on the disk;
                                                "secrets": {...} are the secrets of the function for sources;
                                                "access": {...} is Access.to_wire, the rule for the source;
                                                "assets": path is a folder with copies of the assets
    {"op": "prepare", "manifest": path, "url": "s3://..."}     a hold will follow: import the modules that it needs
    {"op": "share", "host": ..., "port": n, "urls": [...], "token": ..., "certificate": [path, path]}     once, first:
                                                exchange chunks with the nodes at these URLs; null: no TLS
    {"op": "drop", "digests": [...]}            remove these snapshots from memory if they are on the disk too, and unused
    {"op": "give_back", "keep": [...]}          memory is short: drop all but these digests, and delete the spare files
    {"op": "release", "id": 1}                  stop fetching; the snapshot may be evicted
    {"id": 1, "event": "held", "digest": ...}   the files can be mapped; their bytes may still be arriving
    {"id": 1, "event": "done", "bytes": n}      all bytes are here and verified; this hold fetched n of them
    {"id": 1, "event": "failed", "error": {...}}
    {"id": 0, "event": "tiers", "tiers": [{"kind": "tmpfs", "used_bytes": n, ...}], "in_memory": {digest: n}}
                                                at the start, and after each fetch, drop, give_back and release;
                                                in_memory: the snapshots in memory, and their bytes there
    {"id": 0, "event": "sharing", "port": n}    this node serves chunks on this port; or "error": {...}
    {"id": 0, "event": "shared", "taken_bytes": n, "served_bytes": n}    the totals so far, after each fetch and each connection
    {"id": 0, "event": "refused", "message": ...}    another node does not accept the token

The fetcher ends at the end of its standard input: when the gateway closes it or when the gateway has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from setproctitle import setproctitle

from ....errors import LauncherError, PilotflameError, SnapshotError, SourceDenied
from ....snapshot.caching.cache import Cache, Lease
from ....snapshot.caching.node import Budgets, drop_from_memory, node_cache, release_memory
from ....snapshot.format.manifest import Manifest
from ....snapshot.sources.access import ANY, Access
from ....snapshot.sources.locate import KeptSources
from ....snapshot.sources.location import shown
from ....snapshot.sources.source import Kept, Source
from ...calls.link.worker_spec import OF_GATEWAY
from ...ground.telemetry.refusals import Operation, refusal

if TYPE_CHECKING:
    from ....snapshot.peering.chunk_server import ChunkServer
    from ....snapshot.peering.peers import Peers

MOST_MANIFESTS = 64
CLOSE_TIMEOUT_S = 5.0
"""How long the ending fetcher waits for its fetches to stop. Then the process ends, which closes the fetches' connections."""


class Fetcher:
    """Handles the requests. Each hold has its own thread, and keeps its lease until the release."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._sources = KeptSources()
        self._leases: dict[int, Lease | None] = {}
        self._closing: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._shared: tuple[Peers, ChunkServer] | None = None

    def handle(self, request: dict[str, Any]) -> None:
        """Carry out a request, or start a thread that carries it out. Events report the outcome."""
        if request["op"] == "release":
            self._release(int(request["id"]))
            return
        if request["op"] == "share":
            self._share(request)
            return
        if request["op"] == "hold":
            with self._lock:
                self._leases[int(request["id"])] = None
        operations = {
            "hold": self._hold, "prepare": self._prepare, "drop": self._drop, "give_back": self._give_back,
        }  # fmt: skip
        run = operations[request["op"]]
        threading.Thread(target=run, args=(request,), daemon=True).start()

    def close(self) -> None:
        """Release all leases. Free the memory of unused snapshots that are also in the cache on disk."""
        if self._shared is not None:
            # Close the server first: snapshots that other nodes are reading are in use, and would stay in memory.
            self._shared[1].close()
        with self._lock:
            numbers = list(self._leases)
        for number in numbers:
            self._release(number)
        self._wait_for_releases()
        release_memory(self._cache)

    def _share(self, request: dict[str, Any]) -> None:
        """Serve chunks to other nodes, and let later fetches take chunks from those nodes."""
        # The imports are here because most nodes do not share chunks.
        from ....snapshot.peering.chunk_server import ChunkServer, listening  # noqa: PLC0415
        from ....snapshot.peering.peer import PeerList  # noqa: PLC0415
        from ....snapshot.peering.peers import Peers  # noqa: PLC0415
        from ....snapshot.peering.served_chunks import ServedChunks  # noqa: PLC0415

        try:
            sock = listening(request["host"], request["port"])
        except OSError as error:
            why = refusal(Operation.LISTEN, error.errno).why
            fault = f"Chunks cannot be served on {request['host']}:{request['port']}: {why}."
            refused = LauncherError(fault, remedy="Choose another PILOTFLAME_PEERS_PORT.")
            self._emit(0, "sharing", error=refused.to_wire())
            return
        served_chunks, token = ServedChunks(self._cache.tiers), request["token"]
        peer_list = PeerList(request["urls"])
        peers = Peers(
            served_chunks, peer_list, token, on_refused=lambda said: self._emit(0, "refused", message=said)
        )
        files = request["certificate"]
        certificate = (Path(files[0]), Path(files[1])) if files else None
        server = ChunkServer(sock, served_chunks, token, certificate, self._report_shared)
        self._shared, self._cache = (peers, server), Cache(self._cache.tiers, peers)
        server.start()
        self._emit(0, "sharing", port=sock.getsockname()[1])

    def _report_shared(self) -> None:
        if self._shared is not None:
            peers, server = self._shared
            self._emit(0, "shared", taken_bytes=peers.taken_bytes, served_bytes=server.served_bytes)

    def _prepare(self, request: dict[str, Any]) -> None:
        # Ignore errors, because the later hold reports them.
        with contextlib.suppress(PilotflameError, OSError):
            # This caches the manifest for the hold.
            read_manifest(Path(request["manifest"]))
            source = self._open(request)
            if isinstance(source, Kept):
                source.prepare()

    def _wait_for_releases(self) -> None:
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self._lock:
            closing = list(self._closing)
        for thread in closing:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _drop(self, request: dict[str, Any]) -> None:
        digests = set(request["digests"])
        self._drop_from_memory(lambda digest: digest in digests)
        self.report_tiers()

    def _give_back(self, request: dict[str, Any]) -> None:
        keep = set(request["keep"])
        self._drop_from_memory(lambda digest: digest not in keep)
        for tier in self._cache.tiers:
            tier.drop_spares()
        self.report_tiers()

    def _drop_from_memory(self, chosen: Callable[[str], bool]) -> None:
        # Wait for releases that are under way, because a snapshot with a lease stays in memory.
        self._wait_for_releases()
        drop_from_memory(self._cache, chosen)

    def _hold(self, request: dict[str, Any]) -> None:
        number, url = int(request["id"]), request["url"]
        try:
            source = self._open(request)
            described = read_manifest(Path(request["manifest"]))
            try:
                fetched_bytes = self._fetch(number, source, described, request)
            except SourceDenied:
                self._sources.drop(source)
                raise
            if fetched_bytes is None:
                return
        except PilotflameError as error:
            self._emit(number, "failed", error=error.to_wire())
        except Exception as error:  # noqa: BLE001  the gateway waits for an event
            unexpected = SnapshotError(f"{shown(url)} could not be fetched: {error!r}.")
            self._emit(number, "failed", error=unexpected.to_wire())
        else:
            self._emit(number, "done", bytes=fetched_bytes)
        self._report_shared()
        self.report_tiers()

    def _open(self, request: dict[str, Any]) -> Source:
        access = Access.from_wire(request["access"]) if "access" in request else ANY
        return self._sources.open(request["url"], request.get("secrets") or {}, access)

    def _fetch(self, number: int, source: Source, described: Manifest, request: dict[str, Any]) -> int | None:
        """Keep a lease and wait for all bytes. Return how many bytes were fetched, or None if the hold was released
        meanwhile.
        """
        manifest, assets = Path(request["manifest"]), request.get("assets")
        lease = self._cache.open(described, source, assets=Path(assets) if assets else None)
        with self._lock:
            wanted = number in self._leases
            if wanted:
                self._leases[number] = lease
        if not wanted:
            lease.close()
            return None
        self._emit(number, "held", digest=described.digest)
        lease.wait(float(request["timeout_s"]), copied=bool(request.get("copied")))
        if not described.has_digests:
            # Store the digests: the next fetch then verifies its bytes, and does not depend on the versions of the
            # objects. Workers can use the weights even if the digests cannot be written, because the disk is full or
            # the revision is gone.
            with contextlib.suppress(OSError):
                lease.described().write(manifest)
        stats = lease.stats
        return stats.fetched_bytes + stats.taken_bytes if stats is not None else 0

    def _release(self, number: int) -> None:
        with self._lock:
            lease = self._leases.pop(number, None)
        if lease is not None:
            # Close the lease in its own thread: a fetch may take seconds to stop, and the next request must not wait.
            thread = threading.Thread(target=self._close_lease, args=(lease,), daemon=True)
            with self._lock:
                self._closing.add(thread)
            thread.start()

    def _close_lease(self, lease: Lease) -> None:
        try:
            lease.close()
        finally:
            with self._lock:
                self._closing.discard(threading.current_thread())
        self.report_tiers()

    def report_tiers(self) -> None:
        """Report the contents of the tiers, and the bytes that they have received and evicted, for the gateway's
        metrics.
        """
        # Report one state at a time, so that an older state is not reported after a newer one.
        with self._reporting:
            tiers = [
                {
                    "kind": tier.kind, "budget_bytes": tier.budget_bytes, "used_bytes": tier.space.used_bytes(),
                    "spare_bytes": tier.space.spares.total_bytes(),
                    "received_bytes": tier.space.counts.received_bytes, "verified_bytes": tier.space.counts.verified_bytes,
                    "evicted_bytes": tier.space.counts.evicted_bytes,
                }
                for tier in self._cache.tiers
            ]  # fmt: skip
            memory = (tier for tier in self._cache.tiers if tier.kind == "tmpfs")
            stored = [one for tier in memory for one in tier.list() if one.ready]
            in_memory = {one.digest: one.allocated_bytes for one in stored}
            self._emit(0, "tiers", tiers=tiers, in_memory=in_memory)

    def _emit(self, number: int, event: str, **facts: Any) -> None:
        line = orjson.dumps({"id": number, "event": event, **facts}) + b"\n"
        # If the gateway has ended, the pipe is broken. The end of the standard input then ends this process.
        with self._lock, contextlib.suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), line)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file. The last MOST_MANIFESTS manifests are cached until their files change."""
    status = path.stat()
    return _read_manifest(path, (status.st_ino, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=MOST_MANIFESTS)
def _read_manifest(path: Path, _version: tuple[int, ...]) -> Manifest:
    manifest = Manifest.read(path)
    # Compute the digest here, because every `open` needs it.
    _ = manifest.digest
    return manifest


def main() -> None:
    """Run `python -m pilotflame.runtime.node.launching.fetcher <folder of the cache> <JSON of its Budgets>`."""
    setproctitle("pilotflame: fetcher")
    for number in OF_GATEWAY:
        signal.signal(number, signal.SIG_IGN)
    fetcher = Fetcher(node_cache(Path(sys.argv[1]), Budgets(**orjson.loads(sys.argv[2]))))
    fetcher.report_tiers()
    # The connection is reset if the gateway was killed with events unread.
    with contextlib.suppress(ConnectionResetError):
        for line in sys.stdin.buffer:
            fetcher.handle(orjson.loads(line))
    fetcher.close()


if __name__ == "__main__":
    main()
