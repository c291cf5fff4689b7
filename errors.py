"""The error tree: every error that pilotflame raises on purpose.

    PilotflameError
    ├── SettingsError               pilotflame.toml, or a deploy request, is invalid
    ├── RequirementsError           requirements.txt is not met in the function's environment
    ├── CodeError                   the uploaded or named folder is not accepted
    ├── HandlerError                the user's code, before any request
    │   ├── HandlerImportError          handler.py cannot be imported
    │   ├── HandlerSignatureError       handler.py can be imported, but has no valid handler
    │   ├── HandlerBuildError           build(context) raised
    │   └── HandlerSetupError           setup(context) raised
    ├── SnapshotError               weights
    │   ├── ManifestError               the manifest is missing, malformed or of another version
    │   ├── HeaderError                 a safetensors file is malformed
    │   ├── SnapshotMismatch            tensors are missing, unexpected, or of another shape or dtype
    │   ├── SnapshotChanged             a shard is no longer the file that the manifest describes
    │   ├── SnapshotCorrupt             a chunk's digest differs
    │   ├── SourceError                 reading from a source
    │   │   ├── SourceMissing               no such bucket, object or file
    │   │   ├── SourceDenied                credentials are missing, expired or insufficient
    │   │   ├── SourceUnavailable           the source is busy, silent or broke off: a retry may help
    │   │   └── FetchFailed                 all retries failed; names object, chunk and tensors
    │   └── CacheError                  the cache is full, read-only or over its budget
    ├── InvocationError             one request
    │   ├── BadInput                    the body is not JSON
    │   ├── InputInvalid                the body does not fit the handler's annotated input
    │   ├── EventInvalid                the CloudEvent lacks a required attribute, or one is malformed
    │   ├── InputTooLarge               the body exceeds the limit
    │   ├── InputTimeout                the body arrived too slowly
    │   ├── OutputInvalid               the output does not fit its annotation, or is not JSON
    │   ├── HandlerFailed               the handler raised
    │   ├── WorkerDied                  the worker died while it ran this invocation
    │   ├── ActivationFailed            no worker could be started
    │   │   └── RevisionRetired             the revision was replaced, deleted or shut down first
    │   ├── ActivationTimeout           no worker was ready within the hold time
    │   ├── QueueFull                   the function's queue is at its limit
    │   ├── Overloaded                  the deadline cannot be met: refused at once, or just before it ran
    │   ├── DeadlineExceeded            the invocation ran out of time
    │   └── Cancelled                   the caller disconnected
    ├── JobError                    stored invocations
    │   ├── UnknownJob                  no such job, or not this caller's
    │   ├── JobExpired                  the job's result is no longer kept
    │   ├── JobConflict                 the job's state does not allow that
    │   ├── IdempotencyConflict         the same idempotency key was sent with another body
    │   ├── WebhookRefused              a webhook may not call this address
    │   ├── UnknownDelivery             no such delivery of a webhook, or not this function's
    │   └── JobStoreFailed              the jobs database cannot be written or read
    ├── BusFailed                   a message queue, or the destination of its results, failed
    ├── BatchFailed                 the input or output of a batch cannot be used
    ├── AccessError                 callers and their keys
    │   ├── Unauthorized                no API key, or an unknown one
    │   ├── Forbidden                   the key's scopes or functions do not cover the request
    │   ├── QuotaExceeded               the key's rate or concurrency is used up
    │   ├── UnknownKey                  no API key with this id
    │   └── UnknownSecret               the function has no secret of this name
    ├── UnsupportedMedia            the route does not accept the body's media type
    ├── MalformedRequest            the request is not valid HTTP
    ├── UnknownRoute                no route has this path
    ├── MethodNotAllowed            the route does not accept this method
    ├── UnknownFunction             no such function
    ├── LinkError                   the connection between gateway and worker broke, or its protocol was violated
    ├── LauncherError               a zygote could not be started
    └── GatewayError                the gateway cannot start, or broke off
        └── GatewayUnreachable          no gateway listens at this address

Every error has a `code` (stable, for programs), a `message` (names the thing) and a `remedy` (what to do).
`to_wire` and `from_wire` carry errors across processes as JSON.
"""

from __future__ import annotations

from typing import Any, ClassVar

_BY_CODE: dict[str, type[PilotflameError]] = {}


class PilotflameError(Exception):
    """The base class. `code` identifies the class; `status` is its HTTP status, inherited unless a class sets its own."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details or {}

    def __init_subclass__(cls, *, code: str, status: int | None = None) -> None:
        cls.code = code
        if status is not None:
            cls.status = status
        _BY_CODE[code] = cls

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form: `{"type", "message", "remedy", "details"}` without empty parts."""
        wire: dict[str, Any] = {"type": self.code, "message": self.message}
        if self.remedy:
            wire["remedy"] = self.remedy
        if self.details:
            wire["details"] = self.details
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> PilotflameError:
        """Return a peer's error as the same class; an unknown code becomes a plain PilotflameError."""
        cls = _BY_CODE.get(str(wire.get("type")), PilotflameError)
        error = cls.__new__(cls)
        PilotflameError.__init__(
            error,
            str(wire.get("message", "unknown error")),
            remedy=str(wire.get("remedy", "")),
            details=wire.get("details"),
        )
        return error


class SettingsError(PilotflameError, code="settings_invalid", status=422): ...


class RequirementsError(PilotflameError, code="requirements_unmet", status=422): ...


class CodeError(PilotflameError, code="code_invalid", status=422): ...


class HandlerError(PilotflameError, code="handler_error", status=422): ...


class HandlerImportError(HandlerError, code="handler_import_failed"): ...


class HandlerSignatureError(HandlerError, code="handler_signature_invalid"): ...


class HandlerBuildError(HandlerError, code="handler_build_failed"): ...


class HandlerSetupError(HandlerError, code="handler_setup_failed", status=500): ...


class SnapshotError(PilotflameError, code="snapshot_error", status=422): ...


class ManifestError(SnapshotError, code="manifest_invalid"): ...


class HeaderError(SnapshotError, code="safetensors_invalid"): ...


class SnapshotMismatch(SnapshotError, code="snapshot_mismatch"): ...


class SnapshotChanged(SnapshotError, code="snapshot_changed"): ...


class SnapshotCorrupt(SnapshotError, code="snapshot_corrupt"): ...


class SourceError(SnapshotError, code="source_error", status=502): ...


class SourceMissing(SourceError, code="source_missing", status=422): ...


class SourceDenied(SourceError, code="source_denied", status=422): ...


class SourceUnavailable(SourceError, code="source_unavailable", status=503):
    """`retry_after_s` is the wait that the source asked for, if it did."""

    @property
    def retry_after_s(self) -> float | None:
        wanted = self.details.get("retry_after_s")
        return float(wanted) if wanted is not None else None


class FetchFailed(SourceError, code="fetch_failed"): ...


class CacheError(SnapshotError, code="cache_error", status=507): ...


class InvocationError(PilotflameError, code="invocation_error"): ...


class BadInput(InvocationError, code="bad_json", status=400): ...


class InputInvalid(InvocationError, code="input_invalid", status=422): ...


class EventInvalid(InvocationError, code="event_invalid", status=400): ...


class InputTooLarge(InvocationError, code="input_too_large", status=413): ...


class InputTimeout(InvocationError, code="input_timeout", status=408): ...


class OutputInvalid(InvocationError, code="output_invalid"): ...


class HandlerFailed(InvocationError, code="handler_failed"): ...


class WorkerDied(InvocationError, code="worker_died"): ...


class ActivationFailed(InvocationError, code="activation_failed"): ...


class RevisionRetired(ActivationFailed, code="revision_retired", status=503): ...


class ActivationTimeout(InvocationError, code="activation_timeout", status=503): ...


class QueueFull(InvocationError, code="queue_full", status=429): ...


class Overloaded(InvocationError, code="overloaded", status=503):
    """`details` holds `retry_after_s`, the seconds until there will be room."""


class DeadlineExceeded(InvocationError, code="deadline_exceeded", status=504): ...


class Cancelled(InvocationError, code="cancelled", status=499): ...


class JobError(PilotflameError, code="job_error"): ...


class UnknownJob(JobError, code="unknown_job", status=404): ...


class JobExpired(JobError, code="job_expired", status=410): ...


class JobConflict(JobError, code="job_conflict", status=409): ...


class IdempotencyConflict(JobError, code="idempotency_conflict", status=409): ...


class WebhookRefused(JobError, code="webhook_refused", status=422): ...


class UnknownDelivery(JobError, code="unknown_delivery", status=404): ...


class JobStoreFailed(JobError, code="job_store_failed", status=503): ...


class BusFailed(PilotflameError, code="bus_failed", status=502): ...


class BatchFailed(PilotflameError, code="batch_failed", status=422): ...


class AccessError(PilotflameError, code="access_error", status=403): ...


class Unauthorized(AccessError, code="unauthorized", status=401): ...


class Forbidden(AccessError, code="forbidden"): ...


class QuotaExceeded(AccessError, code="quota_exceeded", status=429): ...


class UnknownKey(AccessError, code="unknown_key", status=404): ...


class UnknownSecret(AccessError, code="unknown_secret", status=404): ...


class UnsupportedMedia(PilotflameError, code="unsupported_media", status=415): ...


class MalformedRequest(PilotflameError, code="malformed_request", status=400): ...


class UnknownRoute(PilotflameError, code="unknown_route", status=404): ...


class MethodNotAllowed(PilotflameError, code="method_not_allowed", status=405): ...


class UnknownFunction(PilotflameError, code="unknown_function", status=404):
    """Raised alike for a missing function and for one that the caller may not know of: see `named`."""

    @classmethod
    def named(cls, name: str) -> UnknownFunction:
        """Return the error for the function `name`."""
        return cls(f"There is no function {name[:64]!r}.", remedy="See `pilotflame list`, or deploy it.")


class LinkError(PilotflameError, code="link_error"): ...


class LauncherError(PilotflameError, code="launcher_error"): ...


class GatewayError(PilotflameError, code="gateway_error", status=503): ...


class GatewayUnreachable(GatewayError, code="gateway_unreachable"): ...
