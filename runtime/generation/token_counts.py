"""Counts the tokens of language models in their answers, for calls of all routes, jobs and queues."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from ...handlers.language_model.contract import GenerationRequest
from ..access.keyring import Keyring
from ..billing.account import Account
from ..functions.registry import Functions
from ..serving.invocation import Invocation
from .models import takes

MOST_TOKENS = 10_000_000
"""The most tokens of a prompt, or of an answer, that one call counts."""


class TokenCounts:
    """Observes the language models of a gateway."""

    def __init__(self, functions: Functions, keyring: Keyring) -> None:
        self._functions, self._spend = functions, keyring.spend_model_tokens

    def follow(self, name: str) -> None:
        """Observe the live revision of a function if it is a language model."""
        live = self._functions.get(name)
        if takes(live, GenerationRequest):
            live.revision.observe = partial(self._observe, live.function.account)

    def _observe(self, account: Account, invocation: Invocation) -> None:
        tokens, then = AnswerTokens(account, partial(self._spend, invocation.tenant)), invocation.on_end
        if invocation.stream is not None:
            invocation.stream.on_piece = tokens.note
            return

        def ended() -> None:
            if invocation.output.exception() is None:
                tokens.note(invocation.output.result().payload)
            if then is not None:
                then()

        invocation.on_end = ended


class AnswerTokens:
    """The tokens of one call. They count when they come, so also if the caller leaves early."""

    def __init__(self, account: Account, spend: Callable[[int], None]) -> None:
        """`spend` gets numbers of tokens that count against the caller's limit."""
        self._account, self._spend = account, spend
        self._prompt = self._cached = self._made = 0

    def note(self, piece: bytes) -> None:
        """Count the tokens of a piece. A piece that is no `Delta` has none: its reader raises the error."""
        try:
            found = orjson.loads(piece)
        except orjson.JSONDecodeError:
            return
        if not isinstance(found, dict):
            return
        tokens, usage = found.get("tokens"), found.get("usage")
        made = self._made + (len(tokens) if isinstance(tokens, list) else 0)
        usage = usage if isinstance(usage, dict) else {}
        prompt, cached = _count(usage, "prompt_tokens"), _count(usage, "cached_tokens")
        # A handler may yield text without the tokens, and only their number at the end.
        made = max(made, _count(usage, "completion_tokens"))
        self._add(max(prompt, self._prompt), max(cached, self._cached), made)

    def _add(self, prompt: int, cached: int, made: int) -> None:
        more = prompt - self._prompt, cached - self._cached, made - self._made
        if not any(more):
            return
        self._prompt, self._cached, self._made = prompt, cached, made
        self._account.note_tokens(prompt=more[0], cached=more[1], generated=more[2])
        self._spend(more[0] + more[2])


def _count(usage: dict[str, Any], name: str) -> int:
    found = usage.get(name)
    return (
        min(found, MOST_TOKENS) if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0
    )
