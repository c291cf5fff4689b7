"""Runs handlers that follow RunPod's contract.

The user's file calls `runpod.serverless.start({"handler": …})`, and the handler receives jobs.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ....errors import HandlerFailed, HandlerSignatureError, OutputInvalid
from ....handlers.codec import InputCodec
from ....handlers.contract import Context
from ....handlers.dialect import Entry
from ....handlers.dialect_calls import LenientOutput, awaited, of_kind
from ....handlers.handler import Handler, Hook, kind_of, written
from ....handlers.loading import import_file
from ....handlers.stand_in import is_installed, provide

DEBUGGER = "runpod.serverless.utils.rp_debugger"
_REMEDY = 'Call runpod.serverless.start({"handler": handler}) in it, or name another file in pilotflame.toml.'


class Started(BaseException):
    """Raised by pilotflame's `start` to end the user's file, because at RunPod no code after `start` runs."""


def resolve_runpod(root: Path, entry: Entry, _function: str = "") -> Handler:
    """Return the Handler for the function that the file of `entry` passes to `runpod.serverless.start`.

    Raise HandlerImportError if the import fails, HandlerSignatureError if the file passes no function.
    """
    sdk = RunPodSdk()
    try:
        import_file(root, root / entry.file, as_main=True, prepare=sdk.install)
    except Started:
        # `start` may interrupt the import of a module, and then Python removes that module. At RunPod the module
        # exists while the handler runs, so put it back.
        for name, module in sdk.modules.items():
            sys.modules.setdefault(name, module)
    if sdk.config is None:
        raise HandlerSignatureError(f"{entry.file} never calls runpod.serverless.start.", remedy=_REMEDY)
    call = sdk.config.get("handler")
    if not callable(call):
        fault = f'{entry.file} calls runpod.serverless.start with "handler" {type(call).__name__}, not a function.'
        raise HandlerSignatureError(fault, remedy=_REMEDY)
    jobs = RunPodJobs(call, sdk.config, sdk.running)
    return Handler(
        jobs.caller,
        jobs.kind,
        InputCodec(None),
        LenientOutput(None),
        build=_build_of(call),
        setup=jobs.adapt_concurrency if jobs.modifier else None,
        dialect=entry.dialect,
        entry=f"{entry.file}:{getattr(call, '__name__', type(call).__name__)}",
        aggregate=bool(sdk.config.get("return_aggregate_stream")),
    )


def _build_of(call: Callable[..., Any]) -> Hook | None:
    """Return `build(context)` of the handler's module, a function that plans weights; None if the module has none."""
    build = getattr(written(call), "__globals__", {}).get("build")
    takes_context = inspect.isfunction(build) and [*inspect.signature(build).parameters] == ["context"]
    return build if takes_context else None


class RunPodSdk:
    """Pilotflame's versions of two functions of the `runpod` package. `config` is the argument of `start`."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] | None = None
        # The modules that were loaded when `start` was called.
        self.modules: dict[str, ModuleType] = {}
        # The contexts of the jobs that run now, by job id.
        self.running: dict[str, Context] = {}

    def install(self) -> None:
        """Patch the real package if it is installed. Otherwise make a stand-in importable."""
        if not is_installed("runpod"):
            from .sdk import stand_in  # noqa: PLC0415  imported only if needed

            provide(stand_in(self.start, self.progress_update), __file__)
            return
        serverless: Any = importlib.import_module("runpod.serverless")
        progress: Any = importlib.import_module("runpod.serverless.modules.rp_progress")
        serverless.start = self.start
        serverless.progress_update = progress.progress_update = self.progress_update

    def start(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.modules = dict(sys.modules)
        raise Started

    def progress_update(self, job: Mapping[str, Any], progress: Any) -> None:
        """Report a job's progress. As at RunPod, progress that is not JSON does not make the job fail."""
        try:
            if context := self.running.get(str(job.get("id"))):
                context.progress(progress)
        except OutputInvalid as error:
            sys.stderr.write(f"progress_update: {error}\n")


class RunPodJobs:
    """Calls a RunPod handler with jobs, as RunPod's worker does. `running` maps job ids to contexts."""

    def __init__(
        self, call: Callable[..., Any], config: Mapping[str, Any], running: dict[str, Context]
    ) -> None:
        self._call = call
        self._running = running
        self._refresh = bool(config.get("refresh_worker"))
        self._concurrency = 1
        self.kind = kind_of(call)
        self.modifier = config.get("concurrency_modifier") if self.kind.on_loop else None
        self.caller = of_kind(self.kind, self._run, self._run_async, self._stream, self._stream_async)

    def adapt_concurrency(self, context: Context) -> None:
        """Set the number of jobs that this worker runs at once to the result of the user's `concurrency_modifier`."""
        if self.modifier is None:
            return
        try:
            self._concurrency = max(1, int(self.modifier(self._concurrency)))
        except Exception as error:  # noqa: BLE001  a finished job must not fail because of it
            sys.stderr.write(f"concurrency_modifier failed: {type(error).__name__}: {error}\n")
            return
        context.resize(self._concurrency)

    def _run(self, event: Any, context: Context) -> Any:
        with self._job(event, context) as job:
            # A plain handler may return an awaitable, for example a lambda that calls an async function.
            return _output(awaited(self._call(job)), context)

    async def _run_async(self, event: Any, context: Context) -> Any:
        with self._job(event, context) as job:
            return _output(await self._call(job), context)

    def _stream(self, event: Any, context: Context) -> Iterator[Any]:
        with self._job(event, context) as job, closing(self._call(job)) as pieces:
            for piece in pieces:
                yield _piece(piece)

    async def _stream_async(self, event: Any, context: Context) -> AsyncIterator[Any]:
        with self._job(event, context) as job:
            async with aclosing(self._call(job)) as pieces:
                async for piece in pieces:
                    yield _piece(piece)

    @contextmanager
    def _job(self, event: Any, context: Context) -> Iterator[dict[str, Any]]:
        """Yield the job for the handler. On exit, retire the worker if the user has set `refresh_worker`, and adapt its concurrency."""
        job = job_of(event, context)
        self._running[str(job["id"])] = context
        try:
            yield job
        finally:
            self._running.pop(str(job["id"]), None)
            if not self._running and (debugger := sys.modules.get(DEBUGGER)) is not None:
                # Clear the steps, as RunPod's worker does, because the next job measures steps of the same names.
                debugger.clear_debugger_output()
            if self._refresh:
                context.retire()
            self.adapt_concurrency(context)


def job_of(event: Any, context: Context) -> dict[str, Any]:
    """Return the job for a handler, with its id.

    If the event is an envelope `{"input": …}`, the job is a copy of the envelope. Otherwise the event is the job's
    input.
    """
    extra = context.extra.get("job") or {}
    # The gateway sets "bare" if the event itself is the input. Then a key "input" in it does not mean an envelope.
    enveloped = isinstance(event, dict) and "input" in event and not context.extra.get("bare")
    job = dict(event) if enveloped else {"input": event}
    return {**job, **extra, "id": extra.get("id") or context.id}


def _output(output: Any, context: Context) -> Any:
    """Return a job's output without the keys that are instructions.

    If it has `error`, raise that error. If it has `refresh_worker`, retire the worker.
    """
    if not isinstance(output, dict):
        return output
    rest = {key: value for key, value in output.items() if key not in ("error", "refresh_worker")}
    if output.get("refresh_worker"):
        context.retire()
    if output.get("error"):
        raise _failed(output["error"], rest)
    # RunPod treats an empty dict as no output.
    return rest or None


def _piece(piece: Any) -> Any:
    if isinstance(piece, dict) and piece.get("error"):
        raise _failed(piece["error"], {key: value for key, value in piece.items() if key != "error"})
    return piece


def _failed(error: Any, rest: Mapping[str, Any]) -> HandlerFailed:
    """Return HandlerFailed for the value of `error` in a handler's output. `rest` is the rest of the output."""
    text = error if isinstance(error, str) else json.dumps(error, default=str)
    details = {"returned": json.loads(json.dumps(rest, default=str))} if rest else {}
    return HandlerFailed(text, details=details)
