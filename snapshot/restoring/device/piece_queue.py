"""Orders the pieces of an upload. A piece is ready once its bytes have landed. Pieces that an operation waits for come first."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence

from ...fetching.arrival import Arrival
from .open_shards import between
from .slab import SlabPiece


class PieceQueue:
    """The pieces that no thread has taken yet."""

    def __init__(
        self,
        pieces: Sequence[SlabPiece],
        arrival: Arrival | None,
        taken: Iterable[bool],
        changed: threading.Condition,
    ) -> None:
        """`taken` is True for each of `pieces` that needs no copy. Without an arrival, all bytes have landed.

        With an arrival, call `land` for each chunk that lands.
        """
        self._pieces, self._arrival = pieces, arrival
        self._changed = changed
        """Guards the attributes below. Notified when a piece can be taken, and when no further pieces will come."""
        self._taken = bytearray(taken)
        self.left = self._taken.count(0)
        """How many pieces are not taken."""
        self._ended = False
        self._demanded: set[int] = set()
        self._awaited = [0] * len(pieces)
        """How many chunks each piece waits for."""
        self._waiting: dict[int, list[int]] = {}
        self._ready: list[tuple[int, int]] = []
        """A heap of the pieces whose bytes have landed, by number. Pieces that an operation waits for come first."""
        if arrival is None:
            self._ready = [(1, number) for number in range(len(pieces))]
        else:
            self._await_chunks(arrival)

    def _await_chunks(self, arrival: Arrival) -> None:
        """Count the chunks that each piece waits for."""
        covering = arrival.chunks.covering
        for number, piece in enumerate(self._pieces):
            chunks = {
                chunk for one in piece.segments for chunk in between(*covering(one.shard, one.begin, one.end))
            }
            self._awaited[number] = len(chunks)
            for chunk in chunks:
                self._waiting.setdefault(chunk, []).append(number)

    def land(self, chunk: int) -> None:
        """Record that a chunk has landed."""
        with self._changed:
            for number in self._waiting.pop(chunk, ()):
                self._awaited[number] -= 1
                if not self._awaited[number]:
                    heapq.heappush(self._ready, (number not in self._demanded, number))
                    self._changed.notify_all()

    def demand(self, numbers: Sequence[int]) -> None:
        """Let the chunks of these pieces be fetched next, and the pieces be taken next."""
        with self._changed:
            new = set(numbers) - self._demanded
            self._demanded |= new
            for number in new:
                if not self._awaited[number]:
                    # The piece is in the heap twice now. `take` skips the second entry.
                    heapq.heappush(self._ready, (0, number))
        # Do this without the lock, because a thread of the fetch may wait for the lock in `land`.
        if (arrival := self._arrival) is not None:
            for number in new:
                for segment in self._pieces[number].segments:
                    arrival.demand(*arrival.chunks.covering(segment.shard, segment.begin, segment.end))

    def take(self) -> int | None:
        """Wait for a piece whose bytes have landed, and take it. Return None if no further piece will land."""
        with self._changed:
            while self.left:
                while self._ready:
                    number = heapq.heappop(self._ready)[1]
                    if not self._taken[number]:
                        self._taken[number] = True
                        self.left -= 1
                        return number
                # Check this last, so that pieces that landed before the fetch failed are still copied.
                if self._ended:
                    break
                self._changed.wait()
            self._changed.notify_all()
            return None

    def end(self) -> None:
        """End the wait of all threads in `take`, because no more bytes will land."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
