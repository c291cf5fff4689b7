"""Finds the price of a second of waiting at which as many requests are slow as an owner allows.

A request is slow if its caller waited for a worker to start, or could not wait so long. Each that is slow raises the price,
and all others together lower it, so that it stays where it is just when the target is met. Then the policy, which weighs
waiting against holding, keeps to a share instead of a price. Functions here are pure, and read no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

# The price is at most doubled or halved so often, from the price of the gateway. It is MIDDLE where that is 0.
MOST_DOUBLINGS = 20.0
MIDDLE = 0.001
# One busy period changes the price by a factor of at most 2 ** MOST_STEP: a burst says little of the next one.
MOST_STEP = 2.0
# Older wakes count this much less in the number of slow requests of a wake.
DECAY = 1 / 8
# Requests before these many count half as much in the share that is shown.
RECENT = 1000.0


@dataclass(frozen=True, slots=True)
class SlowShare:
    """What was learned of one function. The default is a function of which nothing is known."""

    doublings: float = 0.0
    """How often the price is doubled; below 0, halved."""
    burst: float = 1.0
    """About how many requests are slow when one is: they wait for the same worker."""
    recent_slow: float = 0.0
    recent: float = 0.0
    """How many requests were slow, and how many there were, lately: older ones count less."""

    def learn(self, target: float, slow: int, requests: int) -> SlowShare:
        """Return this with the requests since the last call, of which `slow` were slow. `target` is a share."""
        if requests <= 0:
            return self
        slow = max(0, min(slow, requests))
        burst = self.burst + DECAY * (slow - self.burst) if slow else self.burst
        # Where the share of slow requests is the target, the steps add up to nothing.
        step = max(-MOST_STEP, min(MOST_STEP, (slow - target * requests) / max(1.0, burst)))
        doublings = max(-MOST_DOUBLINGS, min(MOST_DOUBLINGS, self.doublings + step))
        kept = 0.5 ** (requests / RECENT)
        return SlowShare(doublings, burst, self.recent_slow * kept + slow, self.recent * kept + requests)

    def price(self, usual: float) -> float:
        """Return what a second of waiting is worth, where `usual` is the gateway's price of it."""
        return float((usual or MIDDLE) * 2.0**self.doublings)

    @property
    def share(self) -> float | None:
        """The share of the latest requests that were slow; None if there were none."""
        return self.recent_slow / self.recent if self.recent else None
