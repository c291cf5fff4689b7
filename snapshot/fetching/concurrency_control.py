"""Decides how many connections a fetch opens, how much each connection requests, and when a connection is stalled.

It decides only from measurements that the caller passes, and does no I/O. A fetch starts with a few connections. The
rate is measured over short windows of time. As long as the rate grows enough, the number of connections is doubled (or
quadrupled, if this machine is mostly idle) after each window. If the rate does not grow enough in two windows in a row,
the number of connections goes back to the previous number, and stays there for a while.
"""

from __future__ import annotations

MIN_PART_BYTES = 8 << 20
MAX_PART_BYTES = 64 << 20
FIRST_CONNECTIONS = 4
"""How many connections a fetch starts with. If the server is near, four connections use two cores better than two
connections do, since a thread often waits for the interpreter. If the server is far, more connections open within
milliseconds (see FAR)."""
MAX_CONNECTIONS = 32

FIRST_WINDOW_S = 0.03
WINDOW_S = 0.04
FAR: tuple[tuple[float, int], ...] = ((0.005, 8), (0.015, 16), (0.05, 32))
"""Pairs (seconds, connections). If nothing was received in these seconds after the start, open this number of
connections. The source is far then, and many parallel requests hide its latency."""
PAYS = 0.3
"""After the number of connections was multiplied by n, the rate must grow by a factor of at least 1 + PAYS * (n - 1).
If the rate grows less in both of the next two windows, the number of connections goes back."""
BUSY, BUSY_RATE = 0.85, 100e6
"""If more than the share BUSY of all processor time is used, and at least BUSY_RATE bytes per second and processor
arrive, the number of connections does not grow: this machine is the bottleneck, and more connections would make it
slower. At a lower rate, the number may grow, because other work keeps the processors busy: at BUSY_RATE, the fetch uses
7 % of the processor time (0.7 s for 1 GB with TLS)."""
# If less than this share of all processor time is used, the number of connections is quadrupled instead of doubled.
IDLE = 0.5
AGAIN_S = 2.0
"""How long the fetch waits before it tries more connections again, after more connections did not help."""

# Receiving a part should take this many times as long as waiting for its first byte.
LATENCIES_A_PART = 24
LEAST_SPLIT_BYTES = 1 << 20
STALL_S = 0.05
STALL_LATENCIES = 5
UNKNOWN_STALL_S = 1.0
"""How long a part may receive nothing before the first answer to any request. Until then, the latency is unknown."""
UPDATE_S = 0.025


class ConcurrencyControl:
    """Makes the decisions for one fetch. If `connections` or `part_bytes` is given, that number does not change."""

    def __init__(self, *, connections: int | None = None, part_bytes: int | None = None) -> None:
        self._fixed = connections is not None
        self._part_bytes = part_bytes
        self.connections = connections or FIRST_CONNECTIONS
        self.latency_s = 0.0
        self.rate = 0.0
        """Bytes per second in the last window, summed over all connections."""
        self._before = (0, 0.0)
        """The number of connections and the rate before the last raise, until the raise is judged. Then (0, 0)."""
        self._doubted = False
        """True if the rate did not grow enough in the first window after the raise. New connections take a while to reach
        their full rate, so the raise is undone only after a second such window."""
        self._settled_s: float | None = None
        self._began_s: float | None = None
        self._window: tuple[float, int, float] | None = None
        """When the window began, and the totals of received bytes and of idle seconds at that time."""
        self._from_s = 0.0
        self._length_s = FIRST_WINDOW_S

    @property
    def settled_connections(self) -> int:
        """The last number of connections that the measurements supported. Until a raise is judged, the number before the raise."""
        return self._before[0] or self.connections

    def add_latency(self, waited_s: float) -> None:
        """Add a request, whose answer began after `waited_s`, to the average latency."""
        self.latency_s = waited_s if not self.latency_s else 0.8 * self.latency_s + 0.2 * waited_s

    def next_update_s(self, now_s: float) -> float:
        """Return the seconds after which to call `update` next."""
        if self._window is None:
            return FAR[0][0]
        return min(UPDATE_S, max(0.005, self._window[0] + self._length_s - now_s))

    def update(self, now_s: float, received_bytes: int, idle_s: float, processors: int) -> None:
        """If the window is over, measure the rate, decide on the connections, and begin the next window.

        `received_bytes` is the total since the start of the fetch. `idle_s` is the idle time since the machine's
        boot, summed over all `processors`.
        """
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
            self._decide(now_s, busy if self.rate > BUSY_RATE * processors else min(busy, BUSY))

    def part_bytes(self, waiting_bytes: int) -> int:
        """Return how many bytes to request at once, if `waiting_bytes` are not requested yet.

        Large parts hide the latency. Small parts let all connections end at about the same time.
        """
        if self._part_bytes is not None:
            return self._part_bytes
        wanted = LATENCIES_A_PART * self.latency_s * self.rate / max(1, self.connections)
        if self.rate == 0.0 and self.connections > FIRST_CONNECTIONS:
            wanted = 2 * MIN_PART_BYTES
        fair = waiting_bytes // max(1, self.connections)
        return int(min(max(wanted, MIN_PART_BYTES), max(fair, MIN_PART_BYTES), MAX_PART_BYTES))

    def least_split_bytes(self, active: int) -> int:
        """Return the minimum size of half a part. Another connection takes over a half only if it is this large (see Ranges.split).

        Receiving a smaller half would take less time than requesting it. `active` is the number of parts that are being read.
        """
        return max(LEAST_SPLIT_BYTES, int(self.rate / max(1, active) * (self.latency_s + 0.02)))

    def stall_s(self, *, started: bool, attempts: int) -> float:
        """Return how long a part may receive nothing. Each failed attempt doubles this time."""
        usual_s = STALL_LATENCIES * self.latency_s if self.latency_s else UNKNOWN_STALL_S
        if started and self.rate:
            usual_s = max(usual_s, 8 * (1 << 20) * self.connections / self.rate)
        return max(STALL_S, usual_s) * float(1 << min(attempts, 16))

    def _grow_while_waiting(self, now_s: float) -> None:
        """Raise the number of connections, depending on how long nothing has been received (see FAR)."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if not self._fixed:
            wanted = [count for after_s, count in FAR if now_s - self._began_s >= after_s]
            self.connections = max(self.connections, *wanted, 1)

    def _decide(self, now_s: float, busy: float) -> None:
        before, rate_before = self._before
        if before and self.rate < rate_before * (1 + PAYS * (self.connections / before - 1)):
            if self._doubted:
                self.connections, self._settled_s = before, now_s
                self._before = (0, 0.0)
            self._doubted = not self._doubted
            return
        self._before, self._doubted = (0, 0.0), False
        settled = self._settled_s is not None and now_s - self._settled_s < AGAIN_S
        if settled or busy > BUSY or self.connections >= MAX_CONNECTIONS:
            return
        factor = 4 if busy < IDLE else 2
        self._before = (self.connections, self.rate)
        self.connections = min(MAX_CONNECTIONS, self.connections * factor)
        # Begin the next window only when the new connections are open and their first requests are answered.
        self._window, self._from_s = None, now_s + 1.5 * self.latency_s
