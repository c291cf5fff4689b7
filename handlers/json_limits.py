"""Limits how many values a JSON text may have, because a parser holds the interpreter until it has made all of them.

A short text such as `[[],[],...]` can have millions of values. So the marks between values are counted before the text is parsed,
which takes a small part of the parser's time. A text may have 2 million numbers, a million empty lists, or 400,000 members of
objects.
"""

from __future__ import annotations

from ..errors import InputTooLarge

MAX_MARKS = 2_000_000
WEIGHTS = {",": 1, "[": 2, "{": 2, ":": 4}
"""How much each mark counts: about the time to make what it stands for, in tenths of a microsecond."""
_SHORT = MAX_MARKS // max(WEIGHTS.values())
REMEDY = (
    "Send numbers as application/x-npy or safetensors, and long texts as text/plain, or send less at a time."
)


def excess(text: bytes | str) -> str:
    """Return what a JSON text has too much of; "" if nothing. The marks in its strings count, too."""
    # Most texts are too short for that many marks.
    if len(text) <= _SHORT:
        return ""
    if isinstance(text, str):
        marks = sum(weight * text.count(mark) for mark, weight in WEIGHTS.items())
    else:
        marks = sum(weight * text.count(mark.encode()) for mark, weight in WEIGHTS.items())
    if marks <= MAX_MARKS:
        return ""
    weights = ", ".join(f"{mark} as {weight}" for mark, weight in WEIGHTS.items())
    return f"{marks} marks of values, of at most {MAX_MARKS} (counting {weights})"


def check_json(text: bytes | str) -> None:
    """Raise InputTooLarge if a JSON text of a caller has too many values."""
    if why := excess(text):
        raise InputTooLarge(f"The JSON has {why}.", remedy=REMEDY)
