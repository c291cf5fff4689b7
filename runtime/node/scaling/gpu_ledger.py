"""Books the memory of a node's GPUs that each worker, parked worker and standby may hold. It does no I/O and reads no clock.

A process is booked before it may use a GPU. Its booking is lowered only after the process is known to use less. So as long
as each process keeps to its booking, all processes together use at most the booked memory, and the bookings fit into the
GPUs. Sizes are in MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...ground.settings.resources import CONTEXT_MB
from .placement import Gpu, GpuNeed, MemoryByGpu, candidates, fit, place

# A standby rehearses only with at least this memory of each GPU. Less would leave no room beside the context of the GPU.
REHEARSAL_MB = 2 * CONTEXT_MB


@dataclass(eq=False)
class Booking:
    """The memory of the node's GPUs that one process may use."""

    full: MemoryByGpu
    """The limit of the process while it is not parked."""
    holding: MemoryByGpu
    """The present limit of the process."""


AnyBooking = TypeVar("AnyBooking", bound=Booking)


class GpuLedger(Generic[AnyBooking]):
    """The bookings of a node."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = tuple(gpus)
        self.bookings: list[AnyBooking] = []

    @property
    def booked(self) -> Counter[str]:
        """The booked memory of each GPU."""
        total = Counter[str]()
        for one in self.bookings:
            total.update(one.holding)
        return total

    def plan(
        self, need: GpuNeed, starting: int, waking: Sequence[Booking | None], own: Booking | None
    ) -> list[MemoryByGpu] | None:
        """Return the memory of `starting` more workers; None if they have no room beside the workers that wake.

        The parked workers `waking` count with their full memory. If the standby with the booking `own` becomes a worker,
        its booking counts as free.
        """
        held = [one.full if one in waking else one.holding for one in self.bookings if one is not own]
        found = list[MemoryByGpu]()
        while len(found) < starting and (holding := place(self.gpus, [*held, *found], need)) is not None:
            found.append(holding)
        return found if len(found) >= starting and fit(self.gpus, held) else None

    def rehearsal_room(self, need: GpuNeed) -> tuple[MemoryByGpu, MemoryByGpu] | None:
        """Return the memory of a standby as a worker, and its memory while it rehearses; None if it must not
        rehearse.

        A standby rehearses on the GPUs that it will have as a worker. They are known only if the node has no more
        usable GPUs than one worker needs.
        """
        known = candidates(self.gpus, need)
        if len(known) != need.gpus:
            return None
        booked = self.booked
        full = {gpu.id: need.of(gpu) for gpu in known}
        found = {gpu.id: min(full[gpu.id], gpu.memory_mb - booked[gpu.id]) for gpu in known}
        return (full, found) if min(found.values()) >= REHEARSAL_MB else None

    def add(self, booking: AnyBooking) -> None:
        """Book a process that has not begun to use GPUs. The caller has checked that there is room."""
        self.bookings.append(booking)

    def promote(self, booking: Booking, found: MemoryByGpu) -> None:
        """Book a standby as the worker that it becomes, with the memory that `plan` has found."""
        booking.full = booking.holding = found

    def wake(self, booking: Booking) -> bool:
        """Raise the booking of a parked worker to the full memory of a worker. Return False if there is no room."""
        if not fit(self.gpus, [one.full if one is booking else one.holding for one in self.bookings]):
            return False
        booking.holding = booking.full
        return True

    def note_held(self, booking: Booking, held: MemoryByGpu) -> None:
        """Lower a booking to `held`, because the process has given memory back. Before `wake`, the process must not take more."""
        booking.holding = held

    def remove(self, booking: AnyBooking) -> None:
        """Drop a booking, because the process has ended. Do nothing if it was dropped before."""
        if booking in self.bookings:
            self.bookings.remove(booking)
