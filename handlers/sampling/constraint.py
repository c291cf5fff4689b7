"""Lets an answer have only the tokens that its grammar permits. llguidance says which."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputInvalid


class Constraint:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any) -> None:
        """The matcher is an LLMatcher of llguidance. Raise InputInvalid if its grammar cannot be used."""
        self._matcher = matcher
        self._check()
        self.complete = False
        """True if no token may follow, except one that ends the answer."""

    def copy(self) -> Constraint:
        """Return the constraint of another answer, in the same state. It takes less time than another compilation."""
        return Constraint(self._matcher.deep_copy())

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,), with -inf for each token that may not follow."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        permitted = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()
        refused = torch.ones(len(logits), dtype=torch.bool)
        known = min(len(logits), len(permitted))
        refused[:known] = ~permitted[:known]
        return logits.masked_fill(refused.to(logits.device), -math.inf)

    def accept(self, token: int) -> None:
        """Learn which token follows."""
        if not self._matcher.consume_token(token):
            self._check()
            raise RuntimeError(f"the grammar refuses token {token}: {self._matcher.get_error()}")
        self.complete = self._matcher.is_stopped()

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Return True if an answer may have these tokens and end. Do not use the constraint afterwards."""
        known = self._matcher.try_consume_tokens([*tokens]) == len(tokens)
        return known and bool(self._matcher.is_accepting())

    def _check(self) -> None:
        """Raise InputInvalid if the grammar is not valid or exceeds a limit of llguidance. It may exceed a limit only after some tokens."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise InputInvalid(
                f"The output format or the schema of a tool cannot be used: {reason}",
                remedy="Change the schema, the pattern or the grammar.",
            )


class Constraints:
    """Makes the constraints of one model's answers."""

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        """`ends` are the tokens that end an answer. Raise ImportError without llguidance, and ValueError if it cannot use the tokenizer."""
        import llguidance  # noqa: PLC0415  it may not be installed
        import llguidance.hf  # noqa: PLC0415

        self._matcher: Any = llguidance.LLMatcher
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, eos_token=[*ends] or None)

    def new(self, grammar: str) -> Constraint:
        """Return the constraint of an answer. Raise InputInvalid if the grammar is not valid."""
        return Constraint(self._matcher(self._tokens, self._matcher.grammar_from_lark(grammar), log_level=0))

    def check_properties(self, schema: dict[str, Any]) -> None:
        """Raise InputInvalid if a property of the schema also matches one of the `patternProperties` of its object: llguidance
        would not let an answer end.
        """
        left: list[Any] = [schema]
        while left:
            if isinstance(one := left.pop(), list):
                left += one
            elif isinstance(one, dict):
                left += one.values()
                names, patterns = one.get("properties"), one.get("patternProperties")
                if isinstance(names, dict) and isinstance(patterns, dict) and self._overlap(names, patterns):
                    raise InputInvalid(
                        "The schema has a property that is in properties, and matches one of patternProperties.",
                        remedy="Leave it out of one of them.",
                    )

    def _overlap(self, names: Collection[str], patterns: Collection[str]) -> bool:
        """Return True if one of the names matches one of the patterns. Ask llguidance, which takes linear time for any pattern."""
        either = [{"type": "string", "pattern": pattern} for pattern in patterns]
        grammar = self._matcher.grammar_from_json_schema(json.dumps({"enum": [*names], "anyOf": either}))
        return not self._matcher.validate_grammar(grammar)

    def accepts(self, grammar: str, text: str) -> bool:
        """Return True if a whole answer of this grammar may be this text."""
        return self.new(grammar).accepts(self._tokens.greedy_tokenize(text))
