"""The sleep curve as a function. The work is curve.py's."""

from typing import Any

import curve
import pilotflame


@pilotflame.batch(max_size=32, example={"value": 0})
def handler(events: list[Any]) -> list[Any]:
    answers: list[Any] = curve.answer(events)
    return answers
