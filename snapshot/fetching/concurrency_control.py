"""How many connections a fetch opens, how much each asks for, and how long a silence counts as a stall.

Pure decisions from what is measured; nothing is asked of the user. A few connections are opened at first.
Then, window by window, there are twice as many (four times while this machine is mostly idle), as long as the
rate follows. When it does not, the number before is kept.
"""

from __future__ import annotations

MIN_PART_BYTES = 8 << 20
MAX_PART_BYTES = 64 << 20
FIRST_CONNECTIONS = 2
"""Enough for two cores where the server is near; where it is far, growing from two takes only a moment."""
MAX_CONNECTIONS = 32

FIRST_WINDOW_S = 0.03
WINDOW_S = 0.04
FAR: tuple[tuple[float, int], ...] = ((0.005, 8), (0.015, 16), (0.05, 32))
"""Seconds without a first byte, and the connections to open by then: many hide a far source's latency."""
PAYS = 0.3
"""Growing n-fold pays if the rate grows by at least this share of n - 1."""
BUSY = 0.85
"""A share of all processors. Above it this machine is the bottleneck, and more connections make it slower."""
IDLE = 0.5
AGAIN_S = 2.0
"""How long a settled number is kept before more connections are tried again."""

LATENCIES_A_PART = 24
LEAST_SPLIT_BYTES = 1 << 20
STALL_S = 0.05
STALL_LATENCIES = 5
UNKNOWN_STALL_S = 1.0
"""The stall limit before the first answer, when the latency is unknown."""
UPDATE_S = 0.025


class ConcurrencyControl:
    """The decisions of one fetch. `connections` and `part_bytes` fix what is otherwise measured."""

    def __init__(self, *, connections: int | None = None, part_bytes: int | None = None) -> None:
        self._fixed = connections is not None
        self._part_bytes = part_bytes
        self.connections = connections or FIRST_CONNECTIONS
        self.latency_s = 0.0
        self.rate = 0.0
        """Bytes a second in the last window, all connections together."""
        self._before = (0, 0.0)
        """The connections and the rate before the growth that is being tried; none: (0, 0)."""
        self._settled_s: float | None = None
        self._began_s: float | None = None
        self._window: tuple[float, int, float] | None = None
        """When the window began, and the bytes received and the idle seconds until then."""
        self._from_s = 0.0
        self._length_s = FIRST_WINDOW_S

    @property
    def settled_connections(self) -> int:
        """The connections, without a growth that is still being tried."""
        return self._before[0] or self.connections

    def add_latency(self, waited_s: float) -> None:
        """Count one answer whose first byte came after `waited_s`."""
        self.latency_s = waited_s if not self.latency_s else 0.8 * self.latency_s + 0.2 * waited_s

    def next_update_s(self, now_s: float) -> float:
        """In how many seconds `update` is to be called next."""
        if self._window is None:
            return FAR[0][0]
        return min(UPDATE_S, max(0.005, self._window[0] + self._length_s - now_s))

    def update(self, now_s: float, received_bytes: int, idle_s: float, processors: int) -> None:
        """End the window if it is over, and decide. Both `received_bytes` and `idle_s` are totals."""
        if received_bytes == 0:
            self._grow_while_waiting(now_s)
            return
        if self._window is None:
            if now_s >= self._from_s:
                self._window = (now_s, received_bytes, idle_s)
            return
        began_s, bytes_before, idle_before_s = self._window
        elapsed_s = now_s - began_s
        if elapsed_s < self._length_s:
            return
        self._length_s = max(WINDOW_S, self.latency_s)
        self.rate = (received_bytes - bytes_before) / elapsed_s
        busy = 1 - (idle_s - idle_before_s) / elapsed_s / processors
        self._window = (now_s, received_bytes, idle_s)
        if not self._fixed:
            self._decide(now_s, busy)

    def part_bytes(self, waiting_bytes: int) -> int:
        """How much to request at once: enough to hide the latency, little enough that all end together."""
        if self._part_bytes is not None:
            return self._part_bytes
        wanted = LATENCIES_A_PART * self.latency_s * self.rate / max(1, self.connections)
        if self.rate == 0.0 and self.connections > FIRST_CONNECTIONS:
            wanted = 2 * MIN_PART_BYTES
        fair = waiting_bytes // max(1, self.connections)
        return int(min(max(wanted, MIN_PART_BYTES), max(fair, MIN_PART_BYTES), MAX_PART_BYTES))

    def least_split_bytes(self, active: int) -> int:
        """The least half of a part that is worth requesting anew: its transfer must outlast the request."""
        return max(LEAST_SPLIT_BYTES, int(self.rate / max(1, active) * (self.latency_s + 0.02)))

    def stall_s(self, *, started: bool, attempts: int) -> float:
        """How long a part may be silent before its connection is given up; doubles with each attempt."""
        usual_s = STALL_LATENCIES * self.latency_s if self.latency_s else UNKNOWN_STALL_S
        if started and self.rate:
            usual_s = max(usual_s, 8 * (1 << 20) * self.connections / self.rate)
        return max(STALL_S, usual_s) * float(1 << min(attempts, 16))

    def _grow_while_waiting(self, now_s: float) -> None:
        """Nothing has been received yet: the longer that lasts, the more connections."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if not self._fixed:
            wanted = [count for after_s, count in FAR if now_s - self._began_s >= after_s]
            self.connections = max(self.connections, *wanted, 1)

    def _decide(self, now_s: float, busy: float) -> None:
        (before, rate_before), self._before = self._before, (0, 0.0)
        if before and self.rate < rate_before * (1 + PAYS * (self.connections / before - 1)):
            self.connections, self._settled_s = before, now_s
            return
        settled = self._settled_s is not None and now_s - self._settled_s < AGAIN_S
        if settled or busy > BUSY or self.connections >= MAX_CONNECTIONS:
            return
        factor = 4 if busy < IDLE else 2
        self._before = (self.connections, self.rate)
        self.connections = min(MAX_CONNECTIONS, self.connections * factor)
        # New connections must first open and be answered: the window that judges them begins after that.
        self._window, self._from_s = None, now_s + 1.5 * self.latency_s
