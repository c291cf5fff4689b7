"""Counts the fetches of the node's fetcher, and returns the counts and the state of its cache as metrics.

The fetcher is a process of its own. It reports the totals of its cache whenever a fetch or a hold ends. So these
metrics change at the end of a fetch, not while it runs. If the fetcher is started again, its totals begin at
zero, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .metrics import Numbers, Reading

_TIER_NAMES = {"tmpfs": "memory", "disk": "disk"}
_TIER_COUNTERS = {
    "received": "Bytes of weights received into the tier. The disk also receives copies from memory.",
    "verified": "Bytes of weights whose digests were right: received into the tier, or copied from other weights.",
    "evicted": "Bytes of snapshots evicted from the tier.",
}
_PEER_COUNTERS = {
    "taken": "Bytes of weights taken from other nodes in place of the source.",
    "served": "Bytes of weights served to other nodes.",
}
_TIER_GAUGES = {
    "used": ("cache", "Bytes of snapshots and spare files in the tier."),
    "spare": ("cache_spare", "Bytes of files in the tier that are kept only to use their memory again."),
    "budget": ("cache_budget", "Bytes that the tier may hold."),
}


class SnapshotMetrics:
    """The fetches of one gateway, and the tiers of its node's cache."""

    def __init__(self) -> None:
        self._under_way = 0
        self._outcomes = {"done": 0, "failed": 0, "released": 0}
        self._tiers: Sequence[Mapping[str, Any]] = ()
        self._shared: Mapping[str, int] | None = None

    def began(self) -> None:
        """Count a fetch that begins. The fetcher client calls this for every hold. If the snapshot is already on the
        node, the fetch ends at once, so it is under way only for a moment.
        """
        self._under_way += 1

    def ended(self, outcome: str) -> None:
        """Count a fetch that ended: "done", "failed", or "released" before its end was known."""
        self._under_way -= 1
        self._outcomes[outcome] += 1

    def on_tiers(self, tiers: Sequence[Mapping[str, Any]]) -> None:
        """Use the fetcher's report about its tiers."""
        self._tiers = tiers

    def on_shared(self, taken_bytes: int, served_bytes: int) -> None:
        """Use the fetcher's report about chunks that were exchanged with other nodes."""
        self._shared = {"taken": taken_bytes, "served": served_bytes}

    def take_spare_bytes(self) -> int:
        """Return the bytes of the files that are kept only to use their memory again, and count them as deleted."""
        spare_bytes = sum(int(tier["spare_bytes"]) for tier in self._tiers)
        self._tiers = [{**tier, "spare_bytes": 0} for tier in self._tiers]
        return spare_bytes

    def readings(self) -> Iterator[Reading]:
        """Yield all metrics."""
        under_way: Numbers = {(): self._under_way}
        yield Reading("snapshot_fetches_under_way", "Snapshots that are being fetched.", under_way, ())
        outcomes: Numbers = {(name,): count for name, count in self._outcomes.items()}
        text = "Fetches of snapshots that ended, by outcome."
        yield Reading("snapshot_fetches", text, outcomes, ("outcome",), total=True)
        for key, text in _TIER_COUNTERS.items():
            yield Reading(f"snapshot_{key}_bytes", text, self._of_tiers(key), ("tier",), total=True)
        for key, (name, text) in _TIER_GAUGES.items():
            yield Reading(f"snapshot_{name}_bytes", text, self._of_tiers(key), ("tier",))
        for key, count in (self._shared or {}).items():
            yield Reading(f"snapshot_peer_{key}_bytes", _PEER_COUNTERS[key], {(): count}, (), total=True)

    def _of_tiers(self, key: str) -> dict[tuple[str, ...], float]:
        return {(_TIER_NAMES[tier["kind"]],): tier[f"{key}_bytes"] for tier in self._tiers}
