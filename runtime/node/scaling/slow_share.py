"""Finds the price of a second of waiting at which the share of slow requests is the owner's target.

A request is slow if its caller waited for a worker to start, or if the request failed because its time ran out during
the start. Each slow request raises the price, and each request lowers it a little. Both changes balance exactly if the
share of slow requests is the target. The keep-alive policy weighs the price of waiting against the price of holding. So
with this price, the policy meets the target. Functions here are pure, and read no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

# The largest number of times that the gateway's price is doubled or halved. If the gateway's price is 0, MIDDLE replaces it.
MOST_DOUBLINGS = 20.0
MIDDLE = 0.001
# One busy period changes the price by a factor of at most 2 ** MOST_STEP, because bursts differ from each other.
MOST_STEP = 2.0
# The weight of the latest wake in the mean number of slow requests per wake.
DECAY = 1 / 8
# In the displayed share, the weight of a request halves after each further RECENT requests.
RECENT = 1000.0


@dataclass(frozen=True, slots=True)
class SlowShare:
    """The price factor of one function and its recent share of slow requests. The default is for a new function."""

    doublings: float = 0.0
    """The number of times that the price is doubled or, if this is negative, halved."""
    burst: float = 1.0
    """The mean number of slow requests in a busy period that has any. They all wait for the same worker."""
    recent_slow: float = 0.0
    recent: float = 0.0
    """The recent numbers of slow requests and of all requests. Older requests count less."""

    def learn(self, target: float, slow: int, requests: int) -> SlowShare:
        """Return the state after `requests` requests: `slow` of them were slow, and `target` is the allowed share."""
        if requests <= 0:
            return self
        slow = max(0, min(slow, requests))
        burst = self.burst + DECAY * (slow - self.burst) if slow else self.burst
        # While the share of slow requests is the target, the steps add up to 0.
        step = max(-MOST_STEP, min(MOST_STEP, (slow - target * requests) / max(1.0, burst)))
        doublings = max(-MOST_DOUBLINGS, min(MOST_DOUBLINGS, self.doublings + step))
        kept = 0.5 ** (requests / RECENT)
        return SlowShare(doublings, burst, self.recent_slow * kept + slow, self.recent * kept + requests)

    def price(self, usual: float) -> float:
        """Return the price of a second of waiting. `usual` is the gateway's price."""
        return float((usual or MIDDLE) * 2.0**self.doublings)

    @property
    def share(self) -> float | None:
        """The share of the latest requests that were slow; None before the first request."""
        return self.recent_slow / self.recent if self.recent else None
