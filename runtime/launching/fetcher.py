"""The fetcher: one process a node that brings snapshots into its cache, and holds them there while workers map them.

Workers never see the credentials of object storage: they follow what the fetcher fetches, in files. Orders come as lines
of JSON on standard input, answers go as lines of JSON to standard output:

    {"op": "hold", "id": 1, "manifest": path, "url": "s3://..."}     fetch, unless it is here; keep it until released
    {"op": "release", "id": 1}
    {"id": 1, "event": "held"}                  its files can be mapped; their bytes may still be coming
    {"id": 1, "event": "done", "bytes": n}      everything is here and verified; n of it were fetched for this
    {"id": 1, "event": "failed", "error": {...}}

It ends when its standard input does: when the gateway says so or, however it ended, is no more.
"""

from __future__ import annotations

import signal
import sys
import threading
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


class Fetcher:
    """Leases by the number of their order. A thread an order; answers are written one at a time."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._leases: dict[int, Lease | None] = {}
        self._lock = threading.Lock()

    def obey(self, order: dict[str, Any]) -> None:
        """Take one order; its outcome is told later."""
        number = int(order["id"])
        if order["op"] == "release":
            self._release(number)
            return
        with self._lock:
            self._leases[number] = None
        hold = threading.Thread(
            target=self._hold, args=(number, Path(order["manifest"]), order["url"]), daemon=True
        )
        hold.start()

    def close(self) -> None:
        """Let everything go, and give back the memory that the disk can replace."""
        with self._lock:
            numbers = list(self._leases)
        for number in numbers:
            self._release(number)
        release_memory(self._cache)

    def _hold(self, number: int, manifest: Path, url: str) -> None:
        try:
            lease = self._cache.open(Manifest.read(manifest), open_source(url))
            with self._lock:
                wanted = number in self._leases
                if wanted:
                    self._leases[number] = lease
            if not wanted:  # released before it was there
                lease.close()
                return
            self._say(number, "held")
            lease.wait(WAIT_TIMEOUT_S)
        except PilotflameError as error:
            self._say(number, "failed", error=error.to_wire())
        except Exception as error:  # noqa: BLE001  the gateway waits for an answer, whatever it is
            told = SnapshotError(f"{shown(url)} could not be fetched: {error!r}.")
            self._say(number, "failed", error=told.to_wire())
        else:
            self._say(number, "done", bytes=lease.stats.fetched_bytes if lease.stats is not None else 0)

    def _release(self, number: int) -> None:
        with self._lock:
            lease = self._leases.pop(number, None)
        if lease is not None:
            lease.close()

    def _say(self, number: int, event: str, **facts: Any) -> None:
        line = orjson.dumps({"id": number, "event": event, **facts}) + b"\n"
        with self._lock:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def main() -> None:
    """`python -m pilotflame.runtime.launching.fetcher <folder of the cache>`."""
    setproctitle("pilotflame: fetcher")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which says when to go
    fetcher = Fetcher(node_cache(Path(sys.argv[1])))
    for line in sys.stdin.buffer:
        fetcher.obey(orjson.loads(line))
    fetcher.close()


if __name__ == "__main__":
    main()
