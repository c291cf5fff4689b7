"""Defines every error that pilotflame raises on purpose, as one tree of classes.

The text beside a class says what has happened when it is raised.

    PilotflameError
    ├── SettingsError               pilotflame.toml, or a deploy request, is invalid
    ├── RequirementsError           requirements.txt is refused, or not met in the function's environment
    ├── CodeError                   the deployed folder or the uploaded archive is not accepted
    │   ├── FolderUnseen                the gateway does not see the folder that its client sees at this path
    │   └── BaseChanged                 the revision whose files an upload reuses is no longer live, or has other files
    ├── HandlerError                the user's code failed before it ran any request
    │   ├── HandlerImportError          handler.py cannot be imported
    │   ├── HandlerSignatureError       handler.py can be imported, but has no valid handler
    │   ├── HandlerBuildError           build(context) raised
    │   └── HandlerSetupError           setup(context) raised
    ├── SnapshotError               the weights cannot be used
    │   ├── ManifestError               the manifest is missing, malformed or of another version
    │   ├── HeaderError                 a safetensors file is malformed
    │   ├── NoSuchSnapshot              the handler asks for a snapshot that the settings do not have
    │   ├── SnapshotMismatch            tensors are missing or unexpected, or their shape or dtype differs
    │   ├── SnapshotChanged             a shard is no longer the file that the manifest describes
    │   ├── SnapshotCorrupt             the size or digest of stored data differs from the manifest
    │   ├── SignatureInvalid            the manifest has no valid signature of an accepted key
    │   ├── SourceError                 a source of weights cannot be read
    │   │   ├── SourceMissing               the bucket, object or file does not exist
    │   │   ├── SourceDenied                credentials are missing, expired or insufficient
    │   │   ├── SourceUnavailable           the source is busy or silent, or broke off; a retry may help
    │   │   └── FetchFailed                 all retries failed; it names object, chunk and tensors
    │   ├── PackageMissing              an optional package that this needs is not installed
    │   └── CacheError                  the cache is full, read-only or over its budget
    │       └── StorageFull                 the file system that is written to is full
    ├── InvocationError             one invocation was refused, or failed
    │   ├── BadInput                    the body is not JSON, or a header, name or value is malformed
    │   ├── InputInvalid                the body does not fit the handler's annotated input
    │   ├── EventInvalid                the CloudEvent lacks a required attribute, or one is malformed
    │   ├── InputTooLarge               the body exceeds the limit
    │   ├── InputTimeout                the body arrived too slowly
    │   ├── OutputInvalid               the output does not fit its annotation, or is not JSON
    │   │   ├── OutputNotFinite             a language model computed NaN or an infinity where it chooses a token
    │   │   └── OutputTooLarge              the output exceeds what a worker can send to the gateway at once
    │   ├── HandlerFailed               the handler raised
    │   │   └── EngineStopped               the thread of a language model has ended, and another worker replaces this one
    │   ├── WorkerDied                  the worker died while it ran this invocation
    │   │   └── OutOfMemory                 the kernel killed it because the function's memory ran out
    │   ├── CallEnded                   the gateway ended this call before its deadline
    │   │   ├── RevisionReplaced            calls of the new revision had waited `drain_s` for its worker's place
    │   │   └── ShuttingDown                the gateway shut down, and the call had not ended within `drain_s`
    │   ├── ActivationFailed            no worker could be started
    │   │   ├── CrashLoop                   so many starts in a row failed that no more are tried for a while
    │   │   ├── FunctionStopped             the function may run nothing now
    │   │   │   ├── BudgetExhausted             it has used what its owner allows for a day
    │   │   │   ├── FunctionPaused              its owner has paused it
    │   │   │   └── FunctionBarred              a policy forbids it, its files are damaged, or its weights are still compared
    │   │   └── RevisionRetired             the revision was replaced, deleted or shut down before it ran
    │   ├── ActivationTimeout           no worker was ready within the hold time
    │   ├── QueueFull                   the function's queue is at its limit
    │   ├── Overloaded                  its deadline cannot be met, as found on arrival or just before it ran
    │   ├── DeadlineExceeded            the invocation ran out of time
    │   └── Cancelled                   the caller disconnected
    ├── JobError                    a request about a job or its webhook was refused, or failed
    │   ├── UnknownJob                  the job does not exist, or belongs to another caller
    │   ├── JobExpired                  the job's result is no longer kept
    │   ├── JobConflict                 the job's state does not allow the change
    │   ├── IdempotencyConflict         the same idempotency key was sent with another body
    │   ├── WebhookRefused              the URL of the webhook is not allowed
    │   ├── UnknownDelivery             the function has no webhook delivery of this id
    │   └── JobStoreFailed              the jobs database cannot be written or read
    │       └── JobBodyMissing          the file with the input or result of a job was deleted
    ├── BusFailed                   a message queue, or the destination of its results, could not be used
    │   └── OutputRefused               the destination of a result can never take it
    ├── BatchFailed                 the input or output of a batch cannot be used
    ├── BuildFailed                 a function's image could not be built or pushed
    ├── AccessError                 an API key or secret is missing, or the key does not suffice
    │   ├── Unauthorized                the request has no API key, or an unknown or expired one
    │   ├── Forbidden                   the key's scopes or functions do not cover the request
    │   ├── PolicyViolation             the policy of the gateway or of the key does not allow this deploy
    │   ├── QuotaExceeded               the key's rate or concurrency is used up
    │   ├── UnknownKey                  no API key has this id
    │   └── UnknownSecret               the function has no secret of this name
    ├── UnsupportedMedia            the route does not accept the body's media type
    ├── MalformedRequest            the request is not valid HTTP
    ├── HeadersTooLarge             the header of the request is larger than it may be
    ├── UnknownRoute                no route has this path
    ├── MethodNotAllowed            the route does not accept this method
    ├── NotSupported                the API of another platform has this, and pilotflame does not
    ├── UnknownFunction             no function has this name
    ├── UnknownFile                 no uploaded file of this caller has this id
    ├── UnknownRevision             the function has no such revision
    ├── RevisionsDraining           too many replaced revisions of the function still run calls to replace another one
    ├── PluginError                 a plugin is not installed, cannot be loaded, or is offered twice
    ├── LinkError                   the link of gateway and worker broke, or its protocol was violated
    ├── LauncherError               a zygote, a worker or the fetcher could not be started, or ended
    └── GatewayError                the gateway cannot start, shuts down, or broke off a response
        └── GatewayUnreachable          no gateway listens at this address

Every error has a `code`, which never changes and is for programs, a `message`, which names what failed, and a
`remedy`, which says what the reader can do. `to_wire` and `from_wire` carry errors across processes as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

E = TypeVar("E", bound="PilotflameError")

# Details for callers who may see a function's code. `PilotflameError` moves them from `details` to `private`.
PRIVATE = ("traceback", "stackTrace", "printed", "fault")
# The details of a SnapshotError that all callers get.
NAMED = ("shard", "asset", "chunk", "tensors", "retry_after_s")
MOST_COMPARED = 256
"""An unknown name is compared with at most this number of names, which limits the time. Names with the same first letter come first."""
_BY_CODE: dict[str, type[PilotflameError]] = {}


class PilotflameError(Exception):
    """The base class of all errors.

    Each class has its own `code`. `status` is the HTTP status of a response with this error. A class that
    sets no status has the status of its parent.
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = dict(details or {})
        self.private: dict[str, Any] = {key: self.details.pop(key) for key in PRIVATE if key in self.details}

    def __init_subclass__(cls, *, code: str, status: int | None = None) -> None:
        cls.code = code
        if status is not None:
            cls.status = status
        _BY_CODE[code] = cls

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        # Messages that end with the text of another error may lack the full stop.
        end = "" if self.message[-1:] in ("", ".", "!", "?", "…") else "."
        return f"{self.message}{end} {self.remedy}".strip()

    @property
    def trace(self) -> str:
        """The traceback of user code, and what its processes have printed last; "" if there is neither."""
        printed = f"The last lines of the log:\n{told}\n" if (told := self.private.get("printed")) else ""
        return f"{self.private.get('traceback', '')}{printed}"

    @property
    def whole(self) -> PilotflameError:
        """The error with the text that only the owner of the function gets: it may say where the weights are."""
        if (fault := self.private.get("fault")) is None:
            return self
        others = {key: detail for key, detail in self.private.items() if key != "fault"}
        return self.from_wire({**fault, "details": {**fault.get("details", {}), **others}})

    def to_wire(self, *, private: bool = False) -> dict[str, Any]:
        """Return the error as JSON: `type` (its code), `message` and, unless empty, `remedy`, `details`.

        With `private`, the details include PRIVATE ones, which callers must not see.
        """
        wire: dict[str, Any] = {"type": self.code, "message": self.message}
        if self.remedy:
            wire["remedy"] = self.remedy
        if details := self.details | self.private if private else self.details:
            wire["details"] = details
        return wire

    def copied(self) -> PilotflameError:
        """Return the same error without its traceback."""
        return self.from_wire(self.to_wire(private=True))

    def about(self, subject: str) -> PilotflameError:
        """Return the same error with a message that begins with `subject`; unchanged if that is empty."""
        if not subject or self.message.startswith(f"{subject}: "):
            return self
        return self.from_wire({**self.to_wire(private=True), "message": f"{subject}: {self.message}"})

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> PilotflameError:
        """Return the error that another process encoded with `to_wire`, as an instance of the same class.

        If this process does not know the code, return a PilotflameError.
        """
        cls = _BY_CODE.get(str(wire.get("type")), PilotflameError)
        error = cls.__new__(cls)
        PilotflameError.__init__(
            error,
            str(wire.get("message", "unknown error")),
            remedy=str(wire.get("remedy", "")),
            details=details if isinstance(details := wire.get("details"), dict) else None,
        )
        return error


class SettingsError(PilotflameError, code="settings_invalid", status=422): ...


class RequirementsError(PilotflameError, code="requirements_unmet", status=422): ...


class CodeError(PilotflameError, code="code_invalid", status=422): ...


class FolderUnseen(CodeError, code="folder_unseen"): ...


class BaseChanged(CodeError, code="base_changed", status=409): ...


class HandlerError(PilotflameError, code="handler_error", status=422): ...


class HandlerImportError(HandlerError, code="handler_import_failed"): ...


class HandlerSignatureError(HandlerError, code="handler_signature_invalid"): ...


class HandlerBuildError(HandlerError, code="handler_build_failed"): ...


class HandlerSetupError(HandlerError, code="handler_setup_failed", status=500): ...


class SnapshotError(PilotflameError, code="snapshot_error", status=422): ...


@contextmanager
def snapshot_errors_about(subject: str) -> Iterator[None]:
    """Let the message of a SnapshotError that the block raises begin with `subject`, which may be empty."""
    try:
        yield
    except SnapshotError as error:
        raise error.about(subject) from error.__cause__


class ManifestError(SnapshotError, code="manifest_invalid"): ...


class HeaderError(SnapshotError, code="safetensors_invalid"): ...


class NoSuchSnapshot(SnapshotError, code="no_such_snapshot"):
    """The handler asks for a snapshot that the settings do not have."""


class SnapshotMismatch(SnapshotError, code="snapshot_mismatch"): ...


class SnapshotChanged(SnapshotError, code="snapshot_changed"): ...


class SnapshotCorrupt(SnapshotError, code="snapshot_corrupt"): ...


class SignatureInvalid(SnapshotError, code="signature_invalid"): ...


class SourceError(SnapshotError, code="source_error", status=502): ...


class SourceMissing(SourceError, code="source_missing", status=422): ...


class SourceDenied(SourceError, code="source_denied", status=422): ...


class SourceUnavailable(SourceError, code="source_unavailable", status=503):
    """The source is busy or silent, or broke off. `details` may hold `retry_after_s`."""

    @property
    def retry_after_s(self) -> float | None:
        wanted = self.details.get("retry_after_s")
        return float(wanted) if wanted is not None else None


class FetchFailed(SourceError, code="fetch_failed"): ...


class PackageMissing(SnapshotError, code="package_missing"): ...


class CacheError(SnapshotError, code="cache_error", status=507): ...


class StorageFull(CacheError, code="storage_full"): ...


class InvocationError(PilotflameError, code="invocation_error"): ...


class BadInput(InvocationError, code="bad_json", status=400): ...


class InputInvalid(InvocationError, code="input_invalid", status=422): ...


class EventInvalid(InvocationError, code="event_invalid", status=400): ...


class InputTooLarge(InvocationError, code="input_too_large", status=413): ...


class InputTimeout(InvocationError, code="input_timeout", status=408): ...


class OutputInvalid(InvocationError, code="output_invalid"): ...


class OutputNotFinite(OutputInvalid, code="output_not_finite"): ...


class OutputTooLarge(OutputInvalid, code="output_too_large"): ...


class HandlerFailed(InvocationError, code="handler_failed"): ...


class EngineStopped(HandlerFailed, code="engine_stopped"): ...


class WorkerDied(InvocationError, code="worker_died"): ...


class OutOfMemory(WorkerDied, code="out_of_memory"): ...


class CallEnded(InvocationError, code="call_ended"):
    """The gateway ended a call. If `details` have `retry_after_s`, it is safe to send the request again: nothing was started,
    or the function is idempotent. Otherwise the call may have had effects, and the status tells clients not to retry.
    """

    @classmethod
    def after(cls, error: PilotflameError) -> CallEnded:
        """Return a CallEnded with the message of `error`, for a call that may have run. It has no `retry_after_s`."""
        remedy = f"{error.remedy} The call may have run: find out before you repeat it."
        return cls(error.message, remedy=remedy)

    @property
    def repeatable(self) -> bool:
        return "retry_after_s" in self.details

    @property
    def status(self) -> int:  # type: ignore[override]
        return 503 if self.repeatable else 500


class RevisionReplaced(CallEnded, code="revision_replaced"): ...


class ShuttingDown(CallEnded, code="shutting_down"): ...


class ActivationFailed(InvocationError, code="activation_failed"): ...


class CrashLoop(ActivationFailed, code="crash_loop", status=503):
    """A retry after `details["retry_after_s"]` seconds may succeed."""


class FunctionStopped(ActivationFailed, code="function_stopped", status=503):
    """The function may run nothing now. If this ends by itself, it ends after `details["retry_after_s"]` seconds."""


class BudgetExhausted(FunctionStopped, code="budget_exhausted", status=503):
    """The day's budget is used up. The next day's budget is available after `details["retry_after_s"]` seconds."""


class FunctionPaused(FunctionStopped, code="function_paused", status=503):
    """The owner has paused the function. It runs nothing until it is resumed."""


class FunctionBarred(FunctionStopped, code="function_barred", status=503):
    """The policy of the gateway, or of the function's API key, no longer allows the function to run. Or the function's files are damaged, or
    its weights are still compared.
    """


class RevisionRetired(ActivationFailed, code="revision_retired", status=503): ...


class ActivationTimeout(InvocationError, code="activation_timeout", status=503): ...


class QueueFull(InvocationError, code="queue_full", status=429): ...


class Overloaded(InvocationError, code="overloaded", status=503):
    """The deadline cannot be met. A retry after `details["retry_after_s"]` seconds may succeed."""


class DeadlineExceeded(InvocationError, code="deadline_exceeded", status=504): ...


class Cancelled(InvocationError, code="cancelled", status=499): ...


# Faults of the handler or of its settings. All other SnapshotErrors may say where the weights are, so callers do not get their texts.
OF_HANDLERS = (NoSuchSnapshot, PackageMissing, SnapshotMismatch)


def for_callers(error: PilotflameError) -> PilotflameError:
    """Return the error that callers of a function get: the kind of the fault and the file's name, but not where weights are.

    `whole` of the result is what the function's owner gets.
    """
    if not isinstance(error, SnapshotError) or isinstance(error, OF_HANDLERS) or "fault" in error.private:
        return error
    found = error.details
    file = found.get("shard") or found.get("asset") or str(found.get("object", "")).rpartition("/")[2]
    message, remedy = (
        f"{file or 'The snapshot'} cannot be read ({error.code}).",
        "The log of the function says why.",
    )
    details = {key: found[key] for key in NAMED if key in found} | {"fault": error.to_wire()}
    return type(error)(message, remedy=remedy, details=details)


def wrapped(
    kind: type[E], error: PilotflameError, text: Callable[[str], str], *, remedy: str | None = None, details: Mapping[str, Any]
) -> E:  # fmt: skip
    """Return an error of class `kind` for callers. Its cause is `error`, and `text` makes its message from the message of `error`.

    Its remedy is `remedy`, or the remedy of `error` if `remedy` is None. `details` are added to the details of `error`.
    """
    told = for_callers(error)

    def made(cause: PilotflameError, fault: Mapping[str, Any]) -> E:
        found = {**cause.details, **cause.private, **details, **fault}
        return kind(text(cause.message), remedy=cause.remedy if remedy is None else remedy, details=found)

    if (whole := told.whole) is told:
        return made(told, {})
    return made(told, {"fault": made(whole, {}).to_wire()})


def not_whole(cause: PilotflameError) -> ActivationFailed:
    """Return the error for weights that could not be fetched or read: no code of the function has failed."""
    text, details = "The weights are not whole: {}", {"cause": cause.code}
    return wrapped(ActivationFailed, cause, text.format, details=details)


class JobError(PilotflameError, code="job_error"): ...


class UnknownJob(JobError, code="unknown_job", status=404): ...


class JobExpired(JobError, code="job_expired", status=410): ...


class JobConflict(JobError, code="job_conflict", status=409): ...


class IdempotencyConflict(JobError, code="idempotency_conflict", status=409): ...


class WebhookRefused(JobError, code="webhook_refused", status=422): ...


class UnknownDelivery(JobError, code="unknown_delivery", status=404): ...


class JobStoreFailed(JobError, code="job_store_failed", status=503): ...


class JobBodyMissing(JobStoreFailed, code="job_body_missing", status=500): ...


class BusFailed(PilotflameError, code="bus_failed", status=502): ...


class OutputRefused(BusFailed, code="output_refused", status=422):
    """The destination is gone, or the output is larger than its limit."""


class BatchFailed(PilotflameError, code="batch_failed", status=422): ...


class BuildFailed(PilotflameError, code="build_failed", status=422):
    """`details["reason"]` is one of no_engine, base, disk_full, timeout, push and step."""


class AccessError(PilotflameError, code="access_error", status=403): ...


class Unauthorized(AccessError, code="unauthorized", status=401): ...


class Forbidden(AccessError, code="forbidden"): ...


class PolicyViolation(AccessError, code="policy_violation"):
    """The policy of the gateway, or of the API key, does not allow to deploy the function with these settings."""


class QuotaExceeded(AccessError, code="quota_exceeded", status=429): ...


class UnknownKey(AccessError, code="unknown_key", status=404): ...


class UnknownSecret(AccessError, code="unknown_secret", status=404): ...


class UnsupportedMedia(PilotflameError, code="unsupported_media", status=415): ...


class MalformedRequest(PilotflameError, code="malformed_request", status=400): ...


class HeadersTooLarge(PilotflameError, code="headers_too_large", status=431): ...


class UnknownRoute(PilotflameError, code="unknown_route", status=404): ...


class MethodNotAllowed(PilotflameError, code="method_not_allowed", status=405): ...


class NotSupported(PilotflameError, code="not_supported", status=501): ...


class UnknownFile(PilotflameError, code="unknown_file", status=404): ...


class UnknownFunction(PilotflameError, code="unknown_function", status=404):
    """The function does not exist, or the caller may not know that it exists.

    In both cases the error comes from `named`, so that the caller cannot distinguish them.
    """

    name = ""
    """The name that the caller sent; "" if only a version or an alias is unknown."""

    @classmethod
    def named(cls, name: str, known: Iterable[str] = ()) -> UnknownFunction:
        """Return the error for a function `name` that is missing, or that is not visible to the caller.

        Its remedy suggests the most similar names in `known`, the functions visible to the caller.
        """
        # The import takes time, and a worker never needs it.
        from difflib import get_close_matches  # noqa: PLC0415

        name = name[:64]
        compared = sorted(known, key=lambda one: one[:1] != name[:1])[:MOST_COMPARED]
        close = " or ".join(map(repr, get_close_matches(name, compared, n=2, cutoff=0.7)))
        meant = f"Did you mean {close}? " if close else ""
        error = cls(f"There is no function {name!r}.", remedy=f"{meant}See `pilotflame list`, or deploy it.")
        error.name = name
        return error


class UnknownRevision(PilotflameError, code="unknown_revision", status=404): ...


class RevisionsDraining(PilotflameError, code="revisions_draining", status=409): ...


class PluginError(PilotflameError, code="plugin_failed", status=500): ...


class LinkError(PilotflameError, code="link_error"): ...


class LauncherError(PilotflameError, code="launcher_error"): ...


class GatewayError(PilotflameError, code="gateway_error", status=503): ...


class GatewayUnreachable(GatewayError, code="gateway_unreachable"): ...
