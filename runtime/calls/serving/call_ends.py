"""Makes the errors of invocations that the gateway ends, and of invocations whose worker has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ....errors import OutOfMemory, RevisionReplaced, RevisionRetired, ShuttingDown, WorkerDied
from ...ground.settings.function_settings import FunctionSettings
from ..link.child import EndCause
from ..link.worker_spec import WorkerSpec

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


def retired(spec: WorkerSpec) -> RevisionRetired:
    """Return the error of an invocation that its revision does not run any more."""
    return RevisionRetired(f"Revision {spec.revision} was stopped before this invocation ran.")


def death(settings: FunctionSettings, cause: EndCause, attempt: int, *, harmless: bool) -> WorkerDied:
    """Return the error of an invocation whose worker has died. `harmless` is True if it could have been repeated."""
    message = f"The worker that ran this invocation died of {cause.text} (attempt {attempt})."
    if cause.out_of_memory:
        limit_mb = settings.resources.memory_mb
        limit = f"resources.memory_mb of the function is {limit_mb}." if limit_mb else "It had no limit."
        remedy = "Raise resources.memory_mb in pilotflame.toml, lower scale.max, or use less memory."
        return OutOfMemory(f"{message} {limit}", remedy=remedy, details={"memory_mb": limit_mb})
    remedy = "See `pilotflame logs` for its last words."
    if not harmless:
        remedy += " To have it repeated, if that is harmless, set idempotent = true in pilotflame.toml."
    return WorkerDied(message, remedy=remedy)


def _remedy(repeatable: bool) -> str:
    return "Send it again, as Retry-After says." if repeatable else ONCE


def _details(repeatable: bool) -> dict[str, float]:
    return {"retry_after_s": RETRY_S} if repeatable else {}
