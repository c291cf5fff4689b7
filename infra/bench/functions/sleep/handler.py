"""The sleep curve: a batch of b takes (20 + 0.5 b) ms and no processor, like a batch of a GPU."""

import time
from typing import Any

import pilotflame

FIXED_S, EACH_S = 0.020, 0.0005


@pilotflame.batch(max_size=32, example={"value": 0})
def handler(events: list[Any]) -> list[Any]:
    time.sleep(FIXED_S + EACH_S * len(events))
    return [event["value"] for event in events]
