"""Makes the errors of invocations that the gateway itself ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ....errors import RevisionReplaced, ShuttingDown

# A repeatable invocation may be sent again after this time.
RETRY_S = 2.0
ONCE = (
    "It had begun, so find out what it has done before you repeat it. If a repetition is harmless, set idempotent = true"
    " in pilotflame.toml."
)
CallEnd: TypeAlias = Callable[[bool], RevisionReplaced | ShuttingDown]
"""Returns the error of an invocation. The argument says whether a repetition is harmless."""


def replaced(function: str, drain_s: float) -> CallEnd:
    """Return the errors of the running invocations of an old revision whose place other invocations need."""
    message = (
        f"The gateway ended this call: the revision of {function} that ran it is being replaced, and other calls had"
        f" waited for its place for {drain_s:g} s (drain_s)."
    )

    def error(repeatable: bool) -> RevisionReplaced:
        return RevisionReplaced(message, remedy=_remedy(repeatable), details=_details(repeatable))

    return error


def shutting_down(drain_s: float) -> CallEnd:
    """Return the errors of the invocations that have not ended when the gateway ends."""
    message = f"The gateway shuts down, and this call had not ended within {drain_s:g} s (drain_s)."

    def error(repeatable: bool) -> ShuttingDown:
        return ShuttingDown(message, remedy=_remedy(repeatable), details=_details(repeatable))

    return error


def _remedy(repeatable: bool) -> str:
    return "Send it again, as Retry-After says." if repeatable else ONCE


def _details(repeatable: bool) -> dict[str, float]:
    return {"retry_after_s": RETRY_S} if repeatable else {}
