"""Turns the beginnings of prompts into tokens, and their keys and values into a snapshot."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from pydantic import ValidationError

from ...errors import InputInvalid, SettingsError, SnapshotError
from .causal_model import CausalModel
from .contract import GenerationRequest
from .declared_prefixes import DeclaredPrefixes
from .engine import Engine
from .prefixes import Prefix, Prefixes, check_keeps, key_of, write
from .prompts import Prompts

if TYPE_CHECKING:
    from ...snapshot.computed import ComputedSnapshots
    from ...snapshot.handle import Snapshot


LOG = logging.getLogger(__name__)


class PrefixBuilder:
    """Makes the prefixes of one model."""

    def __init__(self, snapshot: Snapshot, prompts: Prompts, model: CausalModel, most_tokens: int) -> None:
        """`snapshot` has the weights and the tokenizer. A sequence has at most `most_tokens`."""
        self._snapshot, self._prompts, self._model = snapshot, prompts, model
        self._most_tokens = most_tokens

    @cached_property
    def origin(self) -> dict[str, str]:
        """The facts about the model on which its keys and values depend."""
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        files = [self._snapshot.path / name for name in names]
        tokenizer = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file()))
        manifest = self._snapshot.manifest.model_copy(update={"realm": "", "part": None})
        return {
            "weights": manifest.digest, "tokenizer": tokenizer.hexdigest(), "dtype": str(self._model.dtype),
            "transformers": transformers.__version__,
        }  # fmt: skip

    def write(self, given: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, int]:
        """Write the prefixes with these messages and tools into a folder. Return how many tokens each has.

        The weights must have arrived. Raise InputInvalid if the chat template does not take the messages, or writes nothing of
        them, or if a prefix leaves no room for a prompt.
        """
        found = [self._prefix(name, fields) for name, fields in given.items()]
        write(self._model, found, self.origin, folder)
        return {prefix.name: len(prefix.ids) for prefix in found}

    def declare(self, declared: DeclaredPrefixes, engine: Engine) -> None:
        """Let each worker give the declared prefixes to the engine.

        Raise SettingsError if another model has these prefixes, or if a prefix does not fit the model. The error names this prefix.
        """
        if declared.prepare is not None:
            raise SettingsError(
                "Two models have the declared prefixes, which belong to one model.",
                remedy="Give context.prefixes to one call of language_model only.",
            )
        found = []
        for name, fields in declared.beginnings().items():
            try:
                check_keeps(self._model)
                found.append(self._prefix(name, fields))
            except (InputInvalid, SnapshotError) as error:
                raise SettingsError(f"prefixes.{name}: {error.message}", remedy=error.remedy) from error
        # Compute the key here, so that workers inherit it. It takes as long as reading the tokenizer's files.
        key = key_of(found, self.origin)
        declared.prepare = partial(self._prepare, found, key, declared.kept, engine)

    def _prepare(self, prefixes: list[Prefix], key: str, kept: ComputedSnapshots, engine: Engine) -> None:
        """Map the keys and values in a worker that has opened the weights. Compute them if they are not kept."""

        def compute(folder: Path) -> None:
            with self._snapshot.gate():
                write(self._model, prefixes, self.origin, folder, kept.limit_bytes)
            LOG.info("keys and values of [prefixes] are computed: %s", ", ".join(map(_described, prefixes)))

        found = Prefixes(kept.open(key, compute))
        found.read(self.origin)
        engine.prefixes = found

    def _prefix(self, name: str, fields: Mapping[str, Any]) -> Prefix:
        """Return the tokens of a prefix. Raise InputInvalid if no prompt can begin with it."""
        found = Prefix(name, self._common(fields))
        if not found.ids:
            raise InputInvalid(
                f"The prefix {name!r} has no tokens: chats with it have no common beginning.",
                remedy="Give it messages or tools that the chat template writes first.",
            )
        if len(found.ids) >= self._most_tokens:
            raise InputInvalid(
                f"The prefix {name!r} has {len(found.ids)} tokens: the model takes {self._most_tokens} in all.",
                remedy="Shorten it.",
            )
        return found

    def _common(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens of these messages that do not depend on the message after them."""
        endings = ({"role": "user", "content": text} for text in ("A", "b"))
        try:
            chats = [
                GenerationRequest.model_validate({**fields, "messages": [*fields["messages"], ending]})
                for ending in endings
            ]
        except ValidationError as error:
            raise InputInvalid(f"{error.errors()[0]['msg']}.", remedy="Change the prefix.") from None
        first, second = (self._prompts.prompt(chat, self._most_tokens).ids for chat in chats)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        return tuple(token for token, _ in same)


def _described(prefix: Prefix) -> str:
    return f"{prefix.name} ({len(prefix.ids)} tokens)"
