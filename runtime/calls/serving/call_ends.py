"""Makes the errors of invocations that the gateway ends, that are late, or whose worker has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ....errors import (
    ActivationTimeout,
    DeadlineExceeded,
    OutOfMemory,
    RevisionReplaced,
    RevisionRetired,
    ShuttingDown,
    WorkerDied,
)
from ...ground.settings.function_settings import FunctionSettings
from ...ground.settings.scale_spec import ReachedLimit
from ..link.child import EndCause
from ..link.worker_spec import WorkerSpec
from .invocation import Invocation

# A repeatable invocation may be sent again after this time.
RETRY_S = 2.0
ONCE = (
    "It had begun, so find out what it has done before you repeat it. If a repetition is harmless, set idempotent = true"
    " in pilotflame.toml."
)
CallEnd: TypeAlias = Callable[[bool], RevisionReplaced | ShuttingDown]
"""Returns the error of an invocation. The argument says whether a repetition is harmless."""


def replaced(function: str, drain_s: float) -> CallEnd:
    """Return a function that makes the errors of an old revision's running invocations, whose workers other invocations need."""
    message = (
        f"The gateway ended this call: the revision of {function} that ran it is being replaced, and other calls had"
        f" waited for its place for {drain_s:g} s (drain_s)."
    )

    def error(repeatable: bool) -> RevisionReplaced:
        return RevisionReplaced(message, remedy=_remedy(repeatable), details=_details(repeatable))

    return error


def shutting_down(drain_s: float) -> CallEnd:
    """Return a function that makes the errors of the invocations that have not ended when the gateway ends."""
    message = f"The gateway shuts down, and this call had not ended within {drain_s:g} s (drain_s)."

    def error(repeatable: bool) -> ShuttingDown:
        return ShuttingDown(message, remedy=_remedy(repeatable), details=_details(repeatable))

    return error


def retired(spec: WorkerSpec) -> RevisionRetired:
    """Return the error of an invocation that its revision does not run any more."""
    return RevisionRetired(f"Revision {spec.revision} was stopped before this invocation ran.")


def death(
    settings: FunctionSettings, cause: EndCause, invocation: Invocation, *, harmless: bool
) -> WorkerDied:
    """Return the error of an invocation whose worker has died. `harmless` is True if a repetition would do no harm."""
    again = f" (attempt {invocation.attempt})" if invocation.attempt > 1 else ""
    message = f"The worker that ran this invocation died of {cause.text}{again}."
    if cause.out_of_memory:
        limit_mb = settings.resources.memory_mb
        limit = f"resources.memory_mb of the function is {limit_mb}." if limit_mb else "It had no limit."
        remedy = "Raise resources.memory_mb in pilotflame.toml, lower scale.max, or use less memory."
        return OutOfMemory(f"{message} {limit}", remedy=remedy, details={"memory_mb": limit_mb})
    remedy = f"See `pilotflame logs {settings.name}` for its last words."
    if not harmless and not invocation.patient:
        remedy += " To have it repeated, if that is harmless, set idempotent = true in pilotflame.toml."
    return WorkerDied(message, remedy=remedy)


def _remedy(repeatable: bool) -> str:
    return "Send it again, as Retry-After says." if repeatable else ONCE


def _details(repeatable: bool) -> dict[str, float]:
    return {"retry_after_s": RETRY_S} if repeatable else {}


def _all_taken(reached: ReachedLimit) -> tuple[str, str]:
    """Return the text and the remedy for a caller that gets no worker because of a limit."""
    workers = "1 worker" if reached.most == 1 else f"{reached.most} workers"
    if reached.name == "max_workers":
        return (
            f"The gateway may run {workers} (max_workers), and all are taken.",
            "Try again later, raise PILOTFLAME_MAX_WORKERS, or lower scale.max of other functions.",
        )
    if reached.name == "gpus":
        return (
            f"The node's GPUs ({reached.most}) have no room for another worker, and none of theirs was idle.",
            "Try again later, lower resources.gpu_memory_mb or scale.max of functions, or add GPUs.",
        )
    if reached.name == "elsewhere":
        return (
            f"Other gateways have {workers} of those that scale.max allows.",
            "Try again later, or raise scale.max in pilotflame.toml.",
        )
    elsewhere = "" if reached.most else " Other gateways have the others."
    return (
        f"The functions of its owner may have {workers} together, and all are taken.{elsewhere}",
        "Try again later, lower scale.max of the owner's other functions, or deploy with a key that allows more workers.",
    )


def deadline_exceeded(
    waited_s: float,
    reached: ReachedLimit | None = None,
    *,
    allowed_s: float | None = None,
    queued: bool = False,
) -> DeadlineExceeded:
    """Return the error of a late invocation. `reached` is the limit of workers, if it made the invocation wait.

    `allowed_s` is the function's time limit, if the caller has set a shorter time limit. `queued` is True if no worker has had
    room for the invocation.
    """
    if reached is not None:
        text, remedy = _all_taken(reached)
        message = f"The invocation waited {waited_s:.1f} s for a worker. {text}"
        return DeadlineExceeded(message, remedy=remedy, details={reached.name: reached.most})
    if queued:
        message = f"The invocation waited {waited_s:.1f} s in the queue, and no worker had room for it."
        own = (
            ""
            if allowed_s is None
            else f"Send a longer X-Request-Timeout: the function allows {allowed_s:g} s. Or raise"
        )
        remedy = f"{own or 'Raise'} scale.max or concurrency in pilotflame.toml, or send fewer calls at the same time."
        return DeadlineExceeded(message, remedy=remedy)
    if allowed_s is not None:
        message = f"The invocation did not end within the caller's own time limit ({waited_s:.1f} s)."
        remedy = (
            f"Send a longer X-Request-Timeout, or other header of it: the function allows {allowed_s:g} s."
        )
        return DeadlineExceeded(message, remedy=remedy)
    message = f"The invocation did not end within its deadline ({waited_s:.1f} s)."
    return DeadlineExceeded(message, remedy="Raise timeout_s in pilotflame.toml, or ask for less.")


def execution_timeout(limit_s: float) -> DeadlineExceeded:
    message = f"One call of the handler took longer than execution_timeout_s, which is {limit_s:g} s."
    return DeadlineExceeded(message, remedy="Raise execution_timeout_s, or do less in one call.")


def activation_timeout(
    function: str, waited_s: float, reached: ReachedLimit | None = None
) -> ActivationTimeout:
    """Return the error of an invocation that got no worker within its hold time.

    `reached` has the same meaning as in `deadline_exceeded`.
    """
    message = f"No worker of {function!r} was ready within the hold time ({waited_s:.1f} s)."
    if reached is not None:
        text, remedy = _all_taken(reached)
        return ActivationTimeout(f"{message} {text}", remedy=remedy, details={reached.name: reached.most})
    remedy = "Try again: the activation goes on. To wait longer, raise hold_s or send X-Scale-Up-Timeout."
    return ActivationTimeout(message, remedy=remedy)
