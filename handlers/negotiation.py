"""Negotiates content: finds which of the offered types or encodings an Accept header prefers, by RFC 9110.

No library is used: aiohttp's parser ignores q-values, and a worker should not load a library for a single header.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

# The most ranges of a header that are read. No client has a reason to send more ranges.
MAX_RANGES = 64
_QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
_PART = re.compile(r"""(?:[^,"]|"(?:[^"\\]|\\.)*"?)+""")
_PARAMETER = re.compile(r""";((?:[^;"]|"(?:[^"\\]|\\.)*"?)*)""")


class Weight(NamedTuple):
    """How much a header prefers a name: the greater Weight wins. At a quality of 0 the name is refused.

    `exact` is 2 if the header's range is the name itself, 1 for `type/*`, 0 for `*` or `*/*`. `place` is
    smaller for ranges that come later in the header.
    """

    quality: float
    exact: int
    place: int


def weigh(header: str, name: str) -> Weight:
    """Return the weight of `name`, which is in lower case. The most exact range that covers the name decides."""
    found = [(weight, _exactness(pattern, name)) for pattern, weight in _ranges(header)]
    covering = [weight._replace(exact=exact) for weight, exact in found if exact is not None]
    return max(covering, key=lambda weight: weight.exact, default=Weight(0.0, 0, 0))


def preferred(header: str, offered: Sequence[str]) -> str:
    """Return the name in `offered` that the header prefers, or "" if the header accepts none of them.

    Without a header, return the first name. If two names have the same quality, prefer the name with the more exact
    range in the header, then the name whose range comes first.
    """
    if not header:
        return offered[0]
    best = max(offered, key=lambda name: weigh(header, name))
    return best if weigh(header, best).quality else ""


@functools.lru_cache(maxsize=256)
def _ranges(header: str) -> tuple[tuple[str, Weight], ...]:
    """Return each range of the header with its weight, without `exact`. Malformed ranges are ignored."""
    found = []
    for place, match in enumerate(islice(_PART.finditer(header.lower()), MAX_RANGES)):
        part = match[0]
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
