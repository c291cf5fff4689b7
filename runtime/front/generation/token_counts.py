"""Counts the tokens of language models, encoders and rerankers, for calls of all routes, jobs and queues.

If an API key has limits, each of its calls reserves the tokens that the call is expected to use. A call for several
answers also reserves one request for each further answer. At the end of the call, the used tokens replace the reserved
tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import time
from functools import partial
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from ....foreign_json import excess
from ....handlers.encoders import EmbeddingRequest, RerankRequest
from ....handlers.language_model.contract import MOST_ANSWERS, GenerationRequest
from ...calls.serving.invocation import Invocation
from ...ground.access.keyring import Keyring, Reservation, check_quota
from ...ground.billing.account import Account
from ...node.functions.registry import Functions
from .models import takes

MOST_TOKENS = 10_000_000
"""The most tokens of a prompt, or of an answer, that one call counts."""
CHARS_A_TOKEN = 4
LONGEST_ANSWER = 1 << 17
"""The most tokens of an answer whose caller sets no limit: the context of the largest usual models."""
PARSED_BYTES = 64 << 10
"""The longest body that is parsed. In a longer body, regular expressions search for the limits, because parsing the
body would block the event loop.
"""
END_BYTES = 512 << 10
"""A search reads this many bytes at both ends of a text. Reading all of a text of 19 MB would block the event loop."""
USUAL_ANSWER = 128.0
"""The expected tokens of an answer until the model's first call has ended."""
SMOOTHING = 0.1
# No two adjacent parts of this pattern match the same blanks. Otherwise, a search in n blanks would take n² steps.
_ANSWERS = re.compile(rb'"n"\s*:\s*(?:"\s*)?\+?(\d{1,9})')
MOST_FOUND = 1000
"""If `_ANSWERS` matches more often in a body, the call counts as a call for MOST_ANSWERS answers."""
_NUMBER = TypeAdapter(int)
_MADE = re.compile(rb'"tokens"\s*:\s*\[')
_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]{0,4096}\})')
_TOKENS = re.compile(rb'"tokens"\s*:\s*(\d{1,9})')


class TokenCounts:
    """Counts the tokens of all models of a gateway."""

    def __init__(self, functions: Functions, keyring: Keyring) -> None:
        self._functions, self._keyring = functions, keyring

    def follow(self, name: str) -> None:
        """Observe the live revision of a function if it is a model."""
        live = self._functions.get(name)
        if takes(live, GenerationRequest):
            live.revision.observe = ModelCalls(live.function.account, self._keyring).observe
        elif takes(live, EmbeddingRequest) or takes(live, RerankRequest):
            live.revision.observe = ModelCalls(live.function.account, self._keyring, writes=False).observe


class ModelCalls:
    """The calls of one model, and the usual length of its answers."""

    def __init__(self, account: Account, keyring: Keyring, *, writes: bool = True) -> None:
        self._account, self._keyring, self._writes = account, keyring, writes
        self._usual = USUAL_ANSWER if writes else 0.0

    def observe(self, invocation: Invocation) -> None:
        """Count the tokens of a call until its end. Raise QuotaExceeded if it may not begin."""
        answers, reservation = 1, None
        if (meter := self._keyring.meter(invocation.tenant)) is not None:
            asked = _asked(invocation.body)
            answers, tokens = asked.answers, asked.tokens(self._usual)
            wait_s, reservation = meter.reserve(
                time.monotonic(),
                1 if invocation.counted else answers,
                tokens,
                asked=asked.allowed,
                patient=invocation.patient,
            )
            check_quota(meter, wait_s)
        found = AnswerTokens(self._account)
        if invocation.stream is not None:
            invocation.stream.on_piece = found.note
        invocation.output.add_done_callback(
            partial(self._ended, found, answers, reservation, streams=invocation.stream is not None)
        )

    def _ended(
        self, found: AnswerTokens, answers: int, reservation: Reservation | None, output: asyncio.Future[Any], *, streams: bool
    ) -> None:  # fmt: skip
        """Count the output, and settle the reservation. Settle it after an error or a cancellation, too."""
        try:
            succeeded = not output.cancelled() and output.exception() is None
            if succeeded and not streams:
                payload = output.result().payload
                found.note(payload) if self._writes else found.note_input(payload)
            if succeeded and self._writes:
                self._usual += SMOOTHING * (found.made / answers - self._usual)
        finally:
            if reservation is not None:
                reservation.settle(found.used)


class Asked(NamedTuple):
    """What a call asks for."""

    answers: int
    prompt: int
    """The estimated tokens of the input."""
    most: float
    """The most tokens of each answer."""

    def tokens(self, usual: float) -> int:
        """Return the tokens that the call is expected to take, if answers usually have `usual` tokens."""
        return self.prompt + self.answers * math.ceil(min(self.most, usual))

    @property
    def allowed(self) -> int:
        """The most tokens that the call may take."""
        return CHARS_A_TOKEN * self.prompt + self.answers * int(min(self.most, LONGEST_ANSWER))


def _asked(body: bytes) -> Asked:
    """Return what the input of a model asks for. Accept invalid input, because the handler refuses it."""
    prompt = math.ceil(len(body) / CHARS_A_TOKEN)
    if len(body) > PARSED_BYTES:
        # Use the largest number that is found. A match is not inside a JSON string, because a string's quotation marks
        # are escaped. The search skips the middle of the body. What a caller asks for there is not reserved, but its
        # tokens count when the call ends.
        last = _ANSWERS.finditer(body, max(END_BYTES, len(body) - END_BYTES))
        matches = itertools.chain(_ANSWERS.finditer(body, 0, END_BYTES), last)
        found = [int(match[1]) for match in itertools.islice(matches, MOST_FOUND + 1)]
        largest = max(found, default=1) if len(found) <= MOST_FOUND else MOST_ANSWERS
        return Asked(max(1, min(largest, MOST_ANSWERS)), prompt, math.inf)
    try:
        event = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Asked(1, prompt, math.inf)
    if isinstance(event, dict) and isinstance(event.get("input"), dict):
        event = event["input"]
    if not isinstance(event, dict):
        return Asked(1, prompt, math.inf)
    if isinstance(given := event.get("prompt"), list):
        prompt = len(given)
    answers = min(_number(event, "n") or 1, MOST_ANSWERS)
    return Asked(answers, prompt, _number(event, "max_tokens") or math.inf)


def _number(event: dict[str, Any], name: str) -> int:
    """Return a field as the handler reads it, such as 128 for "128"; 0 if it is not positive."""
    try:
        return max(0, min(_NUMBER.validate_python(event.get(name)), MOST_TOKENS))
    except ValidationError:
        return 0


class AnswerTokens:
    """The tokens of one call. They count when they arrive, so they also count if the caller disconnects early."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._prompt = self._cached = self.made = 0

    @property
    def used(self) -> int:
        """The tokens that were read or made."""
        return self._prompt + self.made

    def note_input(self, payload: bytes) -> None:
        """Count the tokens that an encoder or a reranker has read. Its answer may be large, so it is not parsed."""
        if (match := _search(_TOKENS, payload)) is not None:
            self._add(min(int(match[1]), MOST_TOKENS), 0, 0)

    def note(self, piece: bytes) -> None:
        """Count the tokens of a piece. Ignore a piece that is not a `Delta`: `delta_of` raises the error."""
        # A large piece is not parsed on the event loop.
        large = len(piece) > PARSED_BYTES
        try:
            found = None if large or excess(piece) else orjson.loads(piece)
        except orjson.JSONDecodeError:
            return
        if large:
            found = _found_in(piece)
        if not isinstance(found, dict):
            return
        tokens, usage = found.get("tokens"), found.get("usage")
        made = self.made + (len(tokens) if isinstance(tokens, list | range) else 0)
        usage = usage if isinstance(usage, dict) else {}
        prompt, cached = _count(usage, "prompt_tokens"), _count(usage, "cached_tokens")
        # A handler may yield text without its token ids, and report only the number of tokens at the end.
        made = max(made, _count(usage, "completion_tokens"))
        self._add(max(prompt, self._prompt), max(cached, self._cached), made)

    def _add(self, prompt: int, cached: int, made: int) -> None:
        more = prompt - self._prompt, cached - self._cached, made - self.made
        if not any(more):
            return
        self._prompt, self._cached, self.made = prompt, cached, made
        self._account.note_tokens(prompt=more[0], cached=more[1], generated=more[2])


def _search(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
    return pattern.search(text, 0, END_BYTES) or pattern.search(text, max(0, len(text) - END_BYTES))


def _found_in(piece: bytes) -> dict[str, Any]:
    """Return the tokens and the usage of a large piece. Find them with regular expressions, without parsing the piece."""
    made, usage, count = _search(_MADE, piece), _search(_USAGE, piece), 0
    if made is not None and (end := piece.find(b"]", made.end())) > made.end():
        count = piece.count(b",", made.end(), end) + 1
    with contextlib.suppress(orjson.JSONDecodeError):
        return {"tokens": range(count), "usage": orjson.loads(usage[1]) if usage is not None else None}
    return {"tokens": range(count)}


def _count(usage: dict[str, Any], name: str) -> int:
    found = usage.get(name)
    return (
        min(found, MOST_TOKENS) if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0
    )
