"""Answers a request for the tokens of a prompt, in the form of one API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....errors import NotSupported, PilotflameError
from ....handlers.language_model.contract import Delta


class PromptAnswer:
    """The answer to one request. Only one delta of the function has the tokens."""

    def __init__(self, model: str, show: Callable[[Delta], Any]) -> None:
        """`show` returns the response, or None for a delta without the tokens."""
        self._model, self._show = model, show
        self._found: Any = None

    def add(self, _prompt: int, delta: Delta) -> None:
        self._found = self._found or self._show(delta)

    def whole(self) -> Any:
        """Return the response. Raise NotSupported if the function has not returned the tokens."""
        if self._found is None:
            message = f"{self._model} does not tell the tokens of prompts."
            raise NotSupported(message, remedy="Let its handler yield them as `Delta.prompt`.")
        return self._found

    def piece(self, _prompt: int, _delta: Delta) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def failed(self, _error: PilotflameError) -> bytes:
        return b""
