"""Content negotiation: which of the offered types or encodings an Accept header prefers, by RFC 9110.

aiohttp's parser ignores q-values, and a worker loads no HTTP library for one header.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

# More than a client has reason to send. The rest of the header is ignored.
MAX_RANGES = 64
_QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
_PART = re.compile(r"""(?:[^,"]|"(?:[^"\\]|\\.)*"?)+""")
_PARAMETER = re.compile(r""";((?:[^;"]|"(?:[^"\\]|\\.)*"?)*)""")


class Weight(NamedTuple):
    """How much a name is preferred, in sorting order. A quality of 0 means not acceptable.

    `exact` is 2 if a range names it, 1 for its type, 0 for any; `place` is smaller for later ranges.
    """

    quality: float
    exact: int
    place: int


def weigh(header: str, name: str) -> Weight:
    """Return the weight of `name` (lower case): that of the most exact range that covers it."""
    covering = [
        weight._replace(exact=exact)
        for pattern, weight in _ranges(header)
        if (exact := _exactness(pattern, name)) is not None
    ]
    return max(covering, key=lambda weight: weight.exact, default=Weight(0.0, 0, 0))


def preferred(header: str, offered: Sequence[str]) -> str:
    """Return the preferred name of `offered`, of which the first is the default; "" if none is acceptable.

    Of equal qualities, a named one comes before one that a wildcard covers, then the one named first.
    """
    if not header:
        return offered[0]
    best = max(offered, key=lambda name: weigh(header, name))
    return best if weigh(header, best).quality else ""


@functools.lru_cache(maxsize=256)
def _ranges(header: str) -> tuple[tuple[str, Weight], ...]:
    """Return each range with its weight. Malformed ranges are ignored."""
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


def _exactness(pattern: str, name: str) -> int | None:
    if pattern == name:
        return 2
    if pattern in ("*", "*/*"):
        return 0
    return 1 if pattern.endswith("/*") and name.startswith(pattern[:-1]) else None
