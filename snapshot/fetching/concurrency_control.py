"""Decides how many connections a fetch opens, how much each requests, and when a connection is stalled.

It decides only from measurements that the caller passes, and does no I/O. A fetch starts with a few
connections. The rate is measured over short windows of time. After each window the number of connections is
doubled (or quadrupled, if this machine is mostly idle), as long as the rate grows enough. If the rate does not grow
enough in two windows in a row, the number goes back to the previous one, and stays there for a while.
"""

from __future__ import annotations

MIN_PART_BYTES = 8 << 20
MAX_PART_BYTES = 64 << 20
FIRST_CONNECTIONS = 4
"""How many connections a fetch starts with. With a near server, four keep two cores busier than two do, since a thread
often waits for the interpreter. With a far one, the number grows within milliseconds (see FAR)."""
MAX_CONNECTIONS = 32

FIRST_WINDOW_S = 0.03
WINDOW_S = 0.04
FAR: tuple[tuple[float, int], ...] = ((0.005, 8), (0.015, 16), (0.05, 32))
"""Pairs: if nothing was received for this many seconds since the start, open this many connections. The
source is far then, and many parallel requests hide its latency."""
PAYS = 0.3
"""After the number of connections was multiplied by n, the rate must grow by a factor of at least 1 + PAYS * (n - 1).
If the next two windows do not show that, the number goes back."""
BUSY, BUSY_RATE = 0.85, 100e6
"""If a larger share than this of all processor time is used, and this many bytes per second and processor arrive,
the number does not grow: this machine is then the bottleneck, and more connections would make it slower. At a
lower rate, the fetch takes less than a tenth of the processors (1 GB takes 0.7 s with TLS): others use them."""
# If a smaller share than this is used, the number is quadrupled rather than doubled.
IDLE = 0.5
AGAIN_S = 2.0
"""How long the fetch waits, after growing did not help, before it tries more connections again."""

# Receiving a part should take this many times as long as waiting for its first byte.
LATENCIES_A_PART = 24
LEAST_SPLIT_BYTES = 1 << 20
STALL_S = 0.05
STALL_LATENCIES = 5
UNKNOWN_STALL_S = 1.0
"""How long a part may receive nothing while no request was answered yet, so that the latency is unknown."""
UPDATE_S = 0.025


class ConcurrencyControl:
    """The decisions for one fetch. If `connections` or `part_bytes` is given, that number does not change."""

    def __init__(self, *, connections: int | None = None, part_bytes: int | None = None) -> None:
        self._fixed = connections is not None
        self._part_bytes = part_bytes
        self.connections = connections or FIRST_CONNECTIONS
        self.latency_s = 0.0
        self.rate = 0.0
        """Bytes per second in the last window, summed over all connections."""
        self._before = (0, 0.0)
        """The number of connections and the rate before a raise that is not judged yet; else (0, 0)."""
        self._doubted = False
        """True if the raise did not pay in one window. New connections take a while to reach their rate: two count."""
        self._settled_s: float | None = None
        self._began_s: float | None = None
        self._window: tuple[float, int, float] | None = None
        """When the window began, and the totals of received bytes and of idle seconds at that time."""
        self._from_s = 0.0
        self._length_s = FIRST_WINDOW_S

    @property
    def settled_connections(self) -> int:
        """The number of connections. While a raise is not judged yet, the number before it."""
        return self._before[0] or self.connections

    def add_latency(self, waited_s: float) -> None:
        """Include in the average latency one request whose answer began after `waited_s`."""
        self.latency_s = waited_s if not self.latency_s else 0.8 * self.latency_s + 0.2 * waited_s

    def next_update_s(self, now_s: float) -> float:
        """Return in how many seconds `update` is to be called next."""
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

        Large parts hide the latency, small ones let all connections end at about the same time.
        """
        if self._part_bytes is not None:
            return self._part_bytes
        wanted = LATENCIES_A_PART * self.latency_s * self.rate / max(1, self.connections)
        if self.rate == 0.0 and self.connections > FIRST_CONNECTIONS:
            wanted = 2 * MIN_PART_BYTES
        fair = waiting_bytes // max(1, self.connections)
        return int(min(max(wanted, MIN_PART_BYTES), max(fair, MIN_PART_BYTES), MAX_PART_BYTES))

    def least_split_bytes(self, active: int) -> int:
        """Return the least size of a half of a part for another connection to take it (see Ranges.split).

        Receiving it must take longer than requesting it. `active` is the number of parts that are being read.
        """
        return max(LEAST_SPLIT_BYTES, int(self.rate / max(1, active) * (self.latency_s + 0.02)))

    def stall_s(self, *, started: bool, attempts: int) -> float:
        """Return how long a part may receive nothing. Each failed attempt doubles this time."""
        usual_s = STALL_LATENCIES * self.latency_s if self.latency_s else UNKNOWN_STALL_S
        if started and self.rate:
            usual_s = max(usual_s, 8 * (1 << 20) * self.connections / self.rate)
        return max(STALL_S, usual_s) * float(1 << min(attempts, 16))

    def _grow_while_waiting(self, now_s: float) -> None:
        """Raise the number of connections by the time for which nothing has been received (see FAR)."""
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
        # Begin the window that measures the new connections only once they are opened and answered.
        self._window, self._from_s = None, now_s + 1.5 * self.latency_s
