"""Fetches snapshots into the node's cache, in one process per gateway, and protects them from eviction.

Workers have no credentials of object storage: they read the files that the fetcher writes. Requests are lines
of JSON on standard input. Events are lines of JSON on standard output:

    {"op": "hold", "id": 1, "manifest": path, "url": "s3://..."}     fetch if needed; keep until released
                                                with "copied": true, it is done when it is also on the disk;
                                                "secrets": {...} are those of the function that sources use
    {"op": "release", "id": 1}                  stop fetching; the snapshot may be evicted
    {"id": 1, "event": "held"}                  the files can be mapped; their bytes may still be arriving
    {"id": 1, "event": "done", "bytes": n}      all bytes are here and verified; this hold fetched n of them
    {"id": 1, "event": "failed", "error": {...}}
    {"id": 0, "event": "tiers", "tiers": [{"kind": "tmpfs", "used_bytes": n, ...}]}   after each of the above

The fetcher ends at the end of its standard input: when the gateway closes it or when the gateway has ended.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson
from setproctitle import setproctitle

from ...errors import PilotflameError, SnapshotError
from ...snapshot.caching.cache import Cache, Lease
from ...snapshot.caching.node import node_cache, release_memory
from ...snapshot.format.manifest import Manifest
from ...snapshot.sources.locate import open_source
from ...snapshot.sources.location import shown

WAIT_TIMEOUT_S = 6 * 3600.0
CLOSE_TIMEOUT_S = 5.0
"""How long the fetcher waits at its end for fetches to stop. Then it ends, and with it their connections."""


class Fetcher:
    """Handles the requests. Each hold has its own thread, and its lease is kept until the release."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._leases: dict[int, Lease | None] = {}
        self._closing: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()

    def handle(self, request: dict[str, Any]) -> None:
        """Carry out a release, or start a hold, whose outcome is reported by events."""
        number = int(request["id"])
        if request["op"] == "release":
            self._release(number)
            return
        with self._lock:
            self._leases[number] = None
        arguments = (Path(request["manifest"]), request["url"], bool(request.get("copied")))
        secrets = request.get("secrets") or {}
        threading.Thread(target=self._hold, args=(number, *arguments, secrets), daemon=True).start()

    def close(self) -> None:
        """Release all leases. Free the memory of unused snapshots that are also in the cache on disk."""
        with self._lock:
            numbers = list(self._leases)
        for number in numbers:
            self._release(number)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self._lock:
            closing = list(self._closing)
        for thread in closing:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        release_memory(self._cache)

    def _hold(self, number: int, manifest: Path, url: str, copied: bool, secrets: dict[str, str]) -> None:
        try:
            described = Manifest.read(manifest)
            lease = self._cache.open(described, open_source(url, secrets))
            with self._lock:
                wanted = number in self._leases
                if wanted:
                    self._leases[number] = lease
            if not wanted:
                lease.close()
                return
            self._emit(number, "held")
            lease.wait(WAIT_TIMEOUT_S, copied=copied)
            if not described.has_digests:
                # The next fetch verifies what it gets, and does not depend on the versions of the objects. Workers can
                # have the weights even if that cannot be written: the disk is full, or the revision is gone.
                with contextlib.suppress(OSError):
                    lease.described().write(manifest)
        except PilotflameError as error:
            self._emit(number, "failed", error=error.to_wire())
        except Exception as error:  # noqa: BLE001  the gateway waits for an event
            unexpected = SnapshotError(f"{shown(url)} could not be fetched: {error!r}.")
            self._emit(number, "failed", error=unexpected.to_wire())
        else:
            self._emit(number, "done", bytes=lease.stats.fetched_bytes if lease.stats is not None else 0)
        self.report_tiers()

    def _release(self, number: int) -> None:
        with self._lock:
            lease = self._leases.pop(number, None)
        if lease is not None:
            # In a thread of its own: a fetch may take seconds to stop, and the next request must not wait.
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
        """Report what the tiers hold, and what was brought into them and evicted, for the gateway's metrics."""
        # One at a time, so that an older state is not reported after a newer one.
        with self._reporting:
            tiers = [
                {
                    "kind": tier.kind, "budget_bytes": tier.budget_bytes, "used_bytes": tier.used_bytes(),
                    "received_bytes": tier.counts.received_bytes, "verified_bytes": tier.counts.verified_bytes,
                    "evicted_bytes": tier.counts.evicted_bytes,
                }
                for tier in self._cache.tiers
            ]  # fmt: skip
            self._emit(0, "tiers", tiers=tiers)

    def _emit(self, number: int, event: str, **facts: Any) -> None:
        line = orjson.dumps({"id": number, "event": event, **facts}) + b"\n"
        with self._lock:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def main() -> None:
    """Run `python -m pilotflame.runtime.launching.fetcher <folder of the cache>`."""
    setproctitle("pilotflame: fetcher")
    # Ctrl-C reaches this process too, but only the gateway reacts to it. It then ends the fetcher.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fetcher = Fetcher(node_cache(Path(sys.argv[1])))
    fetcher.report_tiers()
    for line in sys.stdin.buffer:
        fetcher.handle(orjson.loads(line))
    fetcher.close()


if __name__ == "__main__":
    main()
