"""The response cache: it stores the outputs of functions with `[response_cache]`, and answers equal calls with them.

Each tenant has answers of its own. So a caller never gets an answer, or a faster answer, because another tenant has made
the same call. The tenants share the memory for answers fairly (`access/fair_share.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...ground.access.fair_share import SharedRoom
from ...ground.telemetry.metrics import Reading
from .invocation import Invocation, Output
from .revision import Revision

OVERHEAD_BYTES = 512
"""About how many bytes an entry takes beside its output."""
MAX_INPUT_BYTES = 1 << 20
"""Calls with a larger body are not looked up, because their digest would block the event loop for milliseconds."""
MAX_ANSWER_BYTES = 1 << 20
"""Larger answers are not stored."""
STATUS = "pilotflame; "
"""The beginning of the header Cache-Status (RFC 9211)."""


class Key(NamedTuple):
    """Identifies an answer. Equal calls of another tenant, or of another revision, have another key."""

    function: str
    epoch: int
    tenant: str
    digest: bytes


class StoredAnswer(NamedTuple):
    """A stored output, when it was stored, and when it expires. Times are in monotonic seconds."""

    output: Output
    stored_s: float
    until_s: float

    @property
    def size(self) -> int:
        return OVERHEAD_BYTES + len(self.output.payload) + len(self.output.content_type)


@dataclass(slots=True)
class FunctionAnswers:
    """The answers of a function's live revision, in the order in which they expire, and counts for the metrics."""

    epoch: int
    """A number that changes when another revision becomes live, or the function is stopped."""
    entries: OrderedDict[Key, StoredAnswer] = field(default_factory=OrderedDict)
    size: int = 0
    hits: int = 0
    misses: int = 0
    waits: int = 0
    evictions: int = 0


class ResponseCache:
    """The stored answers of all functions, at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._room = SharedRoom(most)
        self._epochs = itertools.count()
        self._functions: dict[str, FunctionAnswers] = {}
        # The keys of each tenant, the longest unused key first.
        self._used: defaultdict[str, OrderedDict[Key, None]] = defaultdict(OrderedDict)

    def key(self, function: str, tenant: str, digest: bytes) -> Key:
        if (answers := self._functions.get(function)) is None:
            answers = self._functions[function] = FunctionAnswers(next(self._epochs))
        return Key(function, answers.epoch, tenant, digest)

    def get(self, key: Key, now_s: float, max_age_s: float = math.inf) -> StoredAnswer | None:
        """Return the answer that `key` identifies, unless it is older than `max_age_s`. Count a hit or a miss."""
        answers = self._functions[key.function]
        found = answers.entries.get(key)
        if found is None or now_s >= found.until_s or now_s - found.stored_s > max_age_s:
            answers.misses += 1
            return None
        answers.hits += 1
        self._used[key.tenant].move_to_end(key)
        return found

    def note_waiting(self, function: str) -> None:
        """Count a call that waits for an equal call. `get` has already counted it as a miss."""
        self._functions[function].waits += 1

    def put(self, key: Key, output: Output, now_s: float, ttl_s: float) -> bool:
        """Store an answer, and return True. Return False if there is no room for it, or if its revision is not live any more.

        To make room, drop expired answers, and then the answers that the same tenant has not used for longest. A
        revision must always give the same `ttl_s`, so that its answers stay in the order in which they expire.
        """
        answers = self._functions.get(key.function)
        if answers is None or answers.epoch != key.epoch:
            return False
        self._drop_expired(now_s)
        if key in answers.entries:
            self._drop(key)
        answer = StoredAnswer(output, now_s, now_s + ttl_s)
        while not self._room.takes(key.tenant, answer.size):
            if key.tenant not in self._used:
                return False
            oldest = next(iter(self._used[key.tenant]))
            self._functions[oldest.function].evictions += 1
            self._drop(oldest)
        self._room.add(key.tenant, answer.size)
        answers.entries[key], self._used[key.tenant][key] = answer, None
        answers.size += answer.size
        return True

    def forget(self, function: str) -> None:
        """Drop the answers of a function, because another revision is live now, or because the function is stopped.

        Keys that were made before identify no answer any more.
        """
        if (answers := self._functions.get(function)) is not None:
            for key in list(answers.entries):
                self._drop(key)
            answers.epoch = next(self._epochs)

    def remove(self, function: str) -> None:
        """Drop the answers and the counts of a deleted function."""
        self.forget(function)
        self._functions.pop(function, None)

    async def readings(self) -> Iterable[Reading]:
        """Return the metrics of the cache."""
        self._drop_expired(time.monotonic())

        def numbers(of: Callable[[FunctionAnswers], int]) -> dict[tuple[str, ...], float]:
            return {(name,): of(answers) for name, answers in self._functions.items()}

        return [
            Reading("response_cache_hits", "Calls answered by the response cache.", numbers(lambda a: a.hits), total=True),
            Reading("response_cache_misses", "Calls without a stored answer.", numbers(lambda a: a.misses), total=True),
            Reading("response_cache_waits", "Calls that waited for an equal call.", numbers(lambda a: a.waits), total=True),
            Reading("response_cache_evictions", "Answers dropped for room.", numbers(lambda a: a.evictions), total=True),
            Reading("response_cache_bytes", "Bytes of stored answers.", numbers(lambda a: a.size)),
        ]  # fmt: skip

    def _drop_expired(self, now_s: float) -> None:
        for answers in self._functions.values():
            while answers.entries and next(iter(answers.entries.values())).until_s <= now_s:
                self._drop(next(iter(answers.entries)))

    def _drop(self, key: Key) -> None:
        answers = self._functions[key.function]
        size = answers.entries.pop(key).size
        answers.size -= size
        self._room.remove(key.tenant, size)
        used = self._used[key.tenant]
        del used[key]
        if not used:
            del self._used[key.tenant]


class CachedCall:
    """A call of a function with a response cache: the cache answers it, or stores its output."""

    def __init__(
        self, cache: ResponseCache, revision: Revision, invocation: Invocation, wanted: Mapping[str, str]
    ) -> None:
        """`wanted` has the directives of the caller's header Cache-Control."""
        self._cache, self._revision, self._invocation, self._wanted = cache, revision, invocation, wanted
        self._rule = revision.policy.settings.response_cache

    def start(self) -> None:
        """End the invocation with a stored answer, let it wait for an equal call, or submit it. Raise the errors of
        `Revision.submit`. At its end, the output of a submitted invocation is stored.
        """
        invocation, function = self._invocation, self._revision.spec.function
        if (reason := self._not_looked_up()) is not None:
            invocation.cache_status = f"{STATUS}fwd={reason}"
            self._revision.submit(invocation)
            return
        key = self._cache.key(function, invocation.tenant, digest_of(invocation))
        now_s = time.monotonic()
        if "no-cache" in self._wanted:
            invocation.cache_status = f"{STATUS}fwd=request"
            self._submit(key, waits=False)
        elif (found := self._cache.get(key, now_s, self._max_age_s)) is not None:
            invocation.cache_status = f"{STATUS}hit; ttl={found.until_s - now_s:.0f}"
            invocation.end(found.output)
        else:
            invocation.cache_status = f"{STATUS}fwd=miss"
            if self._submit(key, waits=True):
                self._cache.note_waiting(function)

    def _not_looked_up(self) -> str | None:
        """Return the reason of RFC 9211 for which the call is not looked up, or None if it is looked up."""
        if self._invocation.stream is not None or len(self._invocation.body) > MAX_INPUT_BYTES:
            return "bypass"
        return "request" if "no-store" in self._wanted else None

    def _submit(self, key: Key, *, waits: bool) -> bool:
        """Submit the invocation, and store its output at its end. With `waits`, it may wait for an equal call: then return True."""
        invocation = self._invocation
        then = invocation.on_end

        def ended() -> None:
            self._store(key)
            if then is not None:
                then()

        invocation.on_end = ended
        return self._revision.submit(invocation, key if waits else None)

    @property
    def _max_age_s(self) -> float:
        text = self._wanted.get("max-age", "")
        return float(text) if text.isascii() and text.isdecimal() else math.inf

    def _store(self, key: Key) -> None:
        invocation = self._invocation
        # The output of an invocation that was never sent is the output of an equal call, which is stored already.
        if invocation.output.exception() is not None or not invocation.worker:
            return
        output, ttl_s = invocation.output.result(), self._rule.ttl_s or 0.0
        if len(output.payload) <= MAX_ANSWER_BYTES and self._cache.put(key, output, time.monotonic(), ttl_s):
            invocation.cache_status += "; stored"


def digest_of(invocation: Invocation) -> bytes:
    """Return a digest of everything in the call from which its handler may compute the output.

    The request id, the trace and the time that is left are left out: they differ for each call.
    """
    digest = hashlib.blake2b(digest_size=32)
    for part in (
        invocation.body, invocation.content_type.encode(), invocation.accept.encode(), invocation.extra_json,
    ):  # fmt: skip
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
