"""Turns the tokens of a sequence into text, piece by piece, and ends the text at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder writes for an incomplete character."""
MOST_BYTES = 4
"""The most bytes of a character in UTF-8. Each byte may be a token of its own."""
MOST_HELD = 16
"""With this many tokens, the text does not wait any longer for the end of a character, even if their bytes are no valid character."""


class TextStream:
    """The text of one sequence. A token may be a part of a character, or begin with a space that it has only after another
    token. So new tokens are decoded together with the tokens before them.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        *,
        after: Sequence[int] = (),
        with_stop: bool = False,
        least: int = 0,
    ) -> None:
        """`after` are the tokens before the text. `with_stop` keeps the stop string at the end of the text. A stop string that ends within
        the first `least` tokens is ignored, as in vLLM.
        """
        self._decode, self._stops, self._with_stop, self._least = decode, tuple(stops), with_stop, least
        self._last: list[int] = [*after[-MOST_HELD:]]
        self._new: list[int] = []
        self._begun = ""
        """The decoder's text for an incomplete character at the end of the tokens before the text."""
        self._begin()
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped: str | None = None
        """The stop string that has ended the text."""

    def _begin(self) -> None:
        if not self._last or not (known := self._decode(self._last)).endswith(UNFINISHED):
            return
        whole = len(known.rstrip(UNFINISHED))
        for size in range(1, min(MOST_BYTES, len(self._last)) + 1):
            if len(self._decode(self._last[:-size])) <= whole:
                self._begun, self._new, self._last = known[whole:], self._last[-size:], self._last[:-size]
                return

    def push(self, token: int) -> str:
        """Add a token, and return the text that later tokens cannot change. Return "" after a stop string."""
        self._least -= 1
        self._new.append(token)
        known, text = self._decode(self._last), self._decode(self._last + self._new)
        if len(text) <= len(known):
            if len(self._new) > MOST_HELD:
                # Drop tokens without text, such as the ends of sequences. Otherwise each call would decode all of them again.
                del self._new[0]
            return ""
        if text.endswith(UNFINISHED) and len(self._new) < MOST_HELD:
            return ""
        self._last, self._new = self._new, []
        return self._without_stop(self._after_prompt(text[len(known) :]))

    def finish(self) -> str:
        """Return the rest of the text, without an incomplete character at its end."""
        if self.stopped is not None:
            return ""
        known = self._decode(self._last)
        rest = self._after_prompt(self._decode(self._last + self._new)[len(known) :])
        rest = self._without_stop(rest.rstrip(UNFINISHED))
        held, self._held = self._held, ""
        return rest + held

    def _after_prompt(self, text: str) -> str:
        """Return the text. If it begins with the prompt's incomplete last character, remove this beginning."""
        begun, self._begun = self._begun, ""
        return text.removeprefix(begun)

    def _without_stop(self, text: str) -> str:
        if not self._stops or self.stopped is not None:
            return text if self.stopped is None else ""
        # Find only stop strings that end in the new text. A stop string that ends in `self._held` was ignored because of `least`.
        held, text = len(self._held), self._held + text
        found = [
            (at, stop)
            for stop in self._stops
            if self._least < 0 and (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if found:
            at, self.stopped = min(found, key=lambda one: (one[0], -len(one[1])))
            self._held = ""
            return text[: at + len(self.stopped)] if self._with_stop else text[:at]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def token_text(decode: Callable[[list[int]], str], before: Sequence[int], token: int) -> str:
    """Return what a token adds to the text of the tokens `before` it. As in vLLM, a character of several tokens belongs to its last one,
    and the others have no text.
    """
    text = decode([token])
    if not text.endswith(UNFINISHED):
        return text
    for size in range(1, min(MOST_BYTES, len(before)) + 1):
        context = [*before[-size:]]
        if (text := decode([*context, token])).endswith(UNFINISHED):
            continue
        while context and decode(context[-1:]).endswith(UNFINISHED):
            context.pop()
        return text.removeprefix(decode(context) if context else "")
    return ""


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` with which `text` ends."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
