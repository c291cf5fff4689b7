"""The limits on the workers of a revision, and the limit that a revision has reached."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

# The default window, as in Knative. A worker that was not needed at any time in the window stops.
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """The limits on the number of workers, and the times for which workers stay without being needed."""

    min: int = 0
    max: int = 4
    buffer: int = 0
    """The number of workers in addition to the need, while there is any load."""
    concurrency: int = 1
    """The number of invocations that one worker runs at a time, in all its batches together."""
    scale_to_zero_s: float = 60.0
    """How long the last worker stays without load. Infinity if a plan decides about its end."""
    scale_down_s: float = WINDOW_S
    """The largest need in this window decides how many workers stay. The last worker stays for `scale_to_zero_s`."""
    park_after_s: float = math.inf
    """A worker that was not needed in this time is parked."""
    elsewhere: int = 0
    """The part of the setting `scale.max` that other gateways have. `max` is the rest."""


class ReachedLimit(NamedTuple):
    """The limit that keeps workers from a revision."""

    name: Literal["max_workers", "owner_limit", "gpus", "elsewhere"]
    """The limit of the gateway, the limit of the owner's API key, the memory of the GPUs (placement.py), or the part of `scale.max` that other
    gateways have.
    """
    most: int
