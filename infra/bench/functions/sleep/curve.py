"""The sleep curve, the same for every contestant of `make bench-warm`: a batch of b takes (20 + 0.5 b) ms and no
processor, as a GPU's would."""

from __future__ import annotations

import time
from typing import Any

FIXED_S = 0.020
EACH_S = 0.0005


def seconds(size: int) -> float:
    """How long a batch of `size` takes."""
    return FIXED_S + EACH_S * size


def answer(events: list[Any]) -> list[Any]:
    """Return x for each `{"value": x}`, after the time of a batch of this size."""
    time.sleep(seconds(len(events)))
    return [event["value"] for event in events]
