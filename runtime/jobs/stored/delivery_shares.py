"""Shares the requests that may be sent at a time among the owners of due webhook deliveries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ....fair_queue import FairQueue
from ..webhooks.delivery import Delivery


@dataclass(eq=False, slots=True)
class DueDelivery:
    """A delivery that may be sent, with the attributes that the fair queue needs."""

    tenant: str
    deadline_s: float
    number: int
    host: str
    priority: int = 1


class DeliveryShares:
    """Counts the requests that run at a time, in all (under the host "") and at each host, and compares the counts with
    the limits.
    """

    def __init__(self, most: int, most_per_host: int, sending: Collection[Delivery]) -> None:
        self._most, self._most_per_host = most, most_per_host
        self._used = Counter[str]()
        self._of_owner = Counter[tuple[str, str]]()
        for one in sending:
            self.take(one.owner, one.host)

    def takes(self, owner: str, host: str) -> bool:
        """Return True if the owner has fewer requests than are free, in all and at the host."""
        free = self._most - self._used[""], self._most_per_host - self._used[host]
        return self._of_owner[owner, ""] < free[0] and self._of_owner[owner, host] < free[1]

    def take(self, owner: str, host: str) -> None:
        self._used.update(("", host))
        self._of_owner.update(((owner, ""), (owner, host)))


def shared(found: list[DueDelivery], shares: DeliveryShares, sending: Collection[Delivery]) -> Iterator[int]:
    """Yield the row numbers of the deliveries that may be sent now, in the order in which they are to be sent."""
    queue: FairQueue[DueDelivery] = FairQueue()
    for candidate in sorted(found, key=lambda one: (one.deadline_s, one.number)):
        queue.add(candidate)
    for running in sending:
        queue.charge(running.owner, 1, 1.0)
    while (one := queue.pop()) is not None:
        if shares.takes(one.tenant, one.host):
            shares.take(one.tenant, one.host)
            yield one.number
        else:
            queue.charge(one.tenant, one.priority, -1.0)
