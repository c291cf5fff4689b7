"""How long a caller waits, and how urgent it is to him: what his request's head says of its time.

There is no standard header for a deadline. Ours is `X-Request-Timeout`; a caller that comes by gRPC's, Envoy's or the
OpenAI client's conventions has said it already in theirs. The smallest counts, and never more than the function allows.
Nonsense in ours is refused. Nonsense in the others' is ignored: proxies and libraries write them, and who sent the
request may not even know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import istr

from ...errors import BadInput
from ..serving.invocation import NORMAL
from .requests import seconds

# Looked for in every request: an `istr` has been made ready for that once and for all.
TIMEOUT = istr("X-Request-Timeout")
PRIORITY = istr("X-Priority")
GRPC = istr("grpc-timeout")
ENVOY = istr("x-envoy-expected-rq-timeout-ms")
STAINLESS = istr("x-stainless-read-timeout")
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
_PRIORITIES = {str(number): number for number in range(1, 6)}


def timeout_of(headers: Mapping[str, str], most: float) -> float:
    """Seconds until the answer must be there; `most` at most. BadInput if our own header holds no number of seconds."""
    found = seconds(headers, TIMEOUT, most, most)
    if (text := headers.get(GRPC)) is not None:
        found = min(found, _grpc(text) or found)
    if (text := headers.get(ENVOY)) is not None:
        found = min(found, _number(text) / 1000 or found)
    if (text := headers.get(STAINLESS)) is not None:
        found = min(found, _number(text) or found)
    return found


def priority_of(headers: Mapping[str, str], *, urgent: bool = True) -> int:
    """1 is served first, 5 last; before others only if the caller may be `urgent`. BadInput if it is none of them."""
    text = headers.get(PRIORITY)
    if text is None:
        return NORMAL
    if (found := _PRIORITIES.get(text)) is None:
        raise BadInput(
            f"The header {PRIORITY} is {text[:40]!r}.",
            remedy="It must be a number from 1 (first) to 5 (last).",
        )
    return found if urgent else max(NORMAL, found)


def _grpc(text: str) -> float:
    """Seconds; 0 if it is no timeout of gRPC's."""
    found = _GRPC.fullmatch(text)
    return int(found[1]) * _UNITS[found[2]] if found is not None else 0.0


def _number(text: str) -> float:
    """0 if it is no plain number. Of these conventions 0 means that there is no limit."""
    return float(text) if _NUMBER.fullmatch(text) is not None else 0.0
