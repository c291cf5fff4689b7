"""Accept and Accept-Encoding: which of the things on offer a caller wants, by RFC 9110.

A parser of our own: the one of aiohttp knows no q-values, and a worker loads no HTTP library for a line of text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_RANGES = 64
"""More than a client has reason to send: the rest is not read."""
_QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
_PART = re.compile(r"""(?:[^,"]|"(?:[^"\\]|\\.)*"?)+""")
_PARAMETER = re.compile(r""";((?:[^;"]|"(?:[^"\\]|\\.)*"?)*)""")


class Weight(NamedTuple):
    """How much a thing is wanted; the larger the more. `quality` 0: not at all."""

    quality: float
    exact: int
    place: int


UNWANTED = Weight(0.0, 0, 0)


def weigh(header: str, name: str) -> Weight:
    """How much `name` (lower case) is wanted: as the most exact range that covers it says, `type/*` or `*` among them."""
    found = [
        (exact, weight)
        for pattern, weight in _ranges(header)
        if (exact := _covers(pattern, name)) is not None
    ]
    if not found:
        return UNWANTED
    exact, weight = max(found, key=lambda one: one[0])
    return weight._replace(exact=exact)


def preferred(header: str, offered: Sequence[str]) -> str:
    """What of `offered` (the first is what everybody gets) is wanted most, "" if nothing is.

    Of those wanted equally what was named comes before what a wildcard covers, and then what was named first.
    """
    if not header:
        return offered[0]
    best = max(offered, key=lambda name: weigh(header, name))
    return best if weigh(header, best).quality else ""


@functools.lru_cache(maxsize=256)
def _ranges(header: str) -> tuple[tuple[str, Weight], ...]:
    """Each range with its weight. What is malformed is left out: the caller still gets an answer."""
    found = []
    for place, part in enumerate(_PART.findall(header.lower())[:MAX_RANGES]):
        name = part.partition(";")[0].strip()
        quality = _quality(part)
        if name and quality is not None:
            found.append((name, Weight(quality, 0, -place)))
    return tuple(found)


def _quality(part: str) -> float | None:
    for parameter in _PARAMETER.findall(part):
        key, equals, value = parameter.partition("=")
        if equals and key.strip() == "q":
            return float(value.strip()) if _QUALITY.fullmatch(value.strip()) is not None else None
    return 1.0


def _covers(pattern: str, name: str) -> int | None:
    """How exactly a range names it: 2, by its type alone 1, as anything 0, not at all None."""
    if pattern == name:
        return 2
    if pattern in ("*", "*/*"):
        return 0
    return 1 if pattern.endswith("/*") and name.startswith(pattern[:-1]) else None
