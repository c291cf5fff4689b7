"""Turns the tokens of a sequence into text, piece by piece, and ends it at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder writes for the first bytes of a character whose last bytes are still to come."""
MOST_HELD = 16
"""The most tokens that wait for the end of a character. Bytes that are no character do not hold up the rest."""


class TextStream:
    """The text of one sequence. A token may be a part of a character, or begin with a space that it has only after another
    token. So new tokens are decoded together with the last ones.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        *,
        after: Sequence[int] = (),
        with_stop: bool = False,
    ) -> None:
        """`after` are the tokens before the text. `with_stop` keeps the stop string at the end of the text."""
        self._decode, self._stops, self._with_stop = decode, tuple(stops), with_stop
        self._last: list[int] = [*after[-MOST_HELD:]]
        self._new: list[int] = []
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped: str | None = None
        """The stop string that has ended the text."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that is certain now. After a stop string, there is none."""
        self._new.append(token)
        known, text = self._decode(self._last), self._decode(self._last + self._new)
        if len(text) <= len(known):
            if len(self._new) > MOST_HELD:
                # Tokens without text, such as the ends of sequences. Not all of them need to be decoded again.
                del self._new[0]
            return ""
        if text.endswith(UNFINISHED) and len(self._new) < MOST_HELD:
            return ""
        self._last, self._new = self._new, []
        return self._without_stop(text[len(known) :])

    def finish(self) -> str:
        """Return the rest of the text, without a character whose end was not made."""
        if self.stopped is not None:
            return ""
        known = self._decode(self._last)
        rest = self._without_stop(self._decode(self._last + self._new)[len(known) :].rstrip(UNFINISHED))
        held, self._held = self._held, ""
        return rest + held

    def _without_stop(self, text: str) -> str:
        if not self._stops or self.stopped is not None:
            return text if self.stopped is None else ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda one: (one[0], -len(one[1])))
            self._held = ""
            return text[: at + len(self.stopped)] if self._with_stop else text[:at]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` with which `text` ends."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
