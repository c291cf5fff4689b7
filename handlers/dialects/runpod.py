"""RunPod: a file that calls `runpod.serverless.start({"handler": …})`, its handler called with jobs as RunPod calls it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import HandlerFailed, HandlerSignatureError, OutputInvalid
from ..codec import InputCodec
from ..contract import Context
from ..handler import Handler, HandlerKind, kind_of
from ..loading import import_file
from .bodies import LenientOutput, is_envelope
from .recognise import Entry

_REMEDY = 'Call runpod.serverless.start({"handler": handler}) in it, or name another file in pilotflame.toml.'


class Started(BaseException):
    """Raised by `start`, which never returns at RunPod: nothing that stands after it may run here either."""


def resolve_runpod(root: Path, entry: Entry) -> Handler:
    """The handler that `entry.file` gives to `runpod.serverless.start`. Raises HandlerImportError, HandlerSignatureError."""
    jobs = RunPodJobs()
    try:
        import_file(root, root / entry.file, as_main=True, prepare=jobs.take_over)
    except Started:
        for (
            name,
            module,
        ) in jobs.loaded.items():  # those whose import `start` ended stay, as they would at RunPod
            sys.modules.setdefault(name, module)
    call = _handler_of(jobs.config, entry.file)
    kind = jobs.serve(call)
    return Handler(
        call=jobs.caller,
        kind=kind,
        takes_context=True,
        batch=None,
        input=InputCodec(None),
        output=LenientOutput(),
        build=None,
        rehearse=None,
        setup=jobs.adapt if jobs.modifier is not None and kind.on_loop else None,
        teardown=None,
        dialect="runpod",
        entry=f"{entry.file}:{getattr(call, '__name__', type(call).__name__)}",
        aggregate=bool((jobs.config or {}).get("return_aggregate_stream")),
    )


def _handler_of(config: Mapping[str, Any] | None, file: str) -> Callable[..., Any]:
    if config is None:
        raise HandlerSignatureError(f"{file} never calls runpod.serverless.start.", remedy=_REMEDY)
    call = config.get("handler")
    if not callable(call):
        raise HandlerSignatureError(
            f'{file} calls runpod.serverless.start with "handler" {type(call).__name__}, not a function.',
            remedy=_REMEDY,
        )
    return call  # type: ignore[no-any-return]


class RunPodJobs:
    """What stands in for RunPod's worker: takes `start`'s configuration, then calls its handler with jobs."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] | None = None
        self.loaded: dict[str, ModuleType] = {}
        self.modifier: Callable[[int], int] | None = None
        self.caller: Callable[..., Any] = _nobody
        self._call: Callable[..., Any] = _nobody
        self._refresh = False
        self._concurrency = 1
        self._running: dict[str, Context] = {}

    # -- what the user's file sees of RunPod

    def take_over(self) -> None:
        """`import runpod` gives the real package if it is here, else a stand-in; `start` is ours in both."""
        spec = find_spec("runpod") if "runpod" not in sys.modules else sys.modules["runpod"].__spec__
        if spec is None or spec.origin is None:  # none, or only a folder of that name
            from .runpod_sdk import stand_in  # noqa: PLC0415  only where it is needed

            sys.modules.update(stand_in(self.start, self.progress_update))
            return
        serverless = importlib.import_module("runpod.serverless")
        progress = importlib.import_module("runpod.serverless.modules.rp_progress")
        for module in (serverless, progress):
            module.progress_update = self.progress_update  # type: ignore[attr-defined]
        serverless.start = self.start  # type: ignore[attr-defined]

    def start(self, config: Mapping[str, Any]) -> None:
        """`runpod.serverless.start`."""
        self.config = config
        self.loaded = dict(sys.modules)
        raise Started

    def progress_update(self, job: Mapping[str, Any], progress: Any) -> None:
        """`runpod.serverless.progress_update`. Never fails the job, as RunPod's does not."""
        context = self._running.get(str(job.get("id")))
        if context is None:
            return
        try:
            context.progress(progress)
        except OutputInvalid as error:
            sys.stderr.write(f"progress_update: {error}\n")

    # -- calling the handler

    def serve(self, call: Callable[..., Any]) -> HandlerKind:
        """Takes the handler; `caller` is what is to be called with event and context."""
        config = self.config or {}
        kind = kind_of(call)
        self._call = call
        self._refresh = bool(config.get("refresh_worker"))
        self.modifier = config.get("concurrency_modifier")
        self.caller = {
            HandlerKind.PLAIN: self._answer,
            HandlerKind.ASYNC: self._answer_async,
            HandlerKind.GENERATOR: self._stream,
            HandlerKind.ASYNC_GENERATOR: self._stream_async,
        }[kind]
        return kind

    def _answer(self, event: Any, context: Context) -> Any:
        with self._at_work(event, context) as job:
            answer = self._call(job)
            if inspect.isawaitable(answer):  # a lambda around an async function, say
                answer = asyncio.run(_awaited(answer))
            return self._output(answer, context)

    async def _answer_async(self, event: Any, context: Context) -> Any:
        with self._at_work(event, context) as job:
            return self._output(await self._call(job), context)

    def _stream(self, event: Any, context: Context) -> Iterator[Any]:
        with self._at_work(event, context) as job, closing(self._call(job)) as pieces:
            for piece in pieces:
                yield _piece(piece)

    async def _stream_async(self, event: Any, context: Context) -> AsyncIterator[Any]:
        with self._at_work(event, context) as job:
            async with aclosing(self._call(job)) as pieces:
                async for piece in pieces:
                    yield _piece(piece)

    @contextmanager
    def _at_work(self, event: Any, context: Context) -> Iterator[dict[str, Any]]:
        """The job, while it runs; then what RunPod's worker does between two."""
        job = job_of(event, context)
        self._running[str(job["id"])] = context
        try:
            yield job
        finally:
            self._running.pop(str(job["id"]), None)
            if self._refresh:
                context.retire()
            self.adapt(context)

    def _output(self, answer: Any, context: Context) -> Any:
        """The job's output of what the handler returned, whose `error` and `refresh_worker` are meant for the worker."""
        if not isinstance(answer, dict):
            return answer
        rest = {key: value for key, value in answer.items() if key not in ("error", "refresh_worker")}
        if answer.get("refresh_worker"):
            context.retire()
        if answer.get("error"):
            raise _failed(answer["error"], rest)
        return rest or None  # an empty one is no output at RunPod

    def adapt(self, context: Context) -> None:
        """Asks the file's `concurrency_modifier` how many jobs are to run at the same time from now on."""
        if self.modifier is None or not kind_of(self._call).on_loop:
            return
        try:
            self._concurrency = max(1, int(self.modifier(self._concurrency)))
        except Exception as error:  # noqa: BLE001  the user's; a job that is done must not fail by it
            sys.stderr.write(f"concurrency_modifier failed: {type(error).__name__}: {error}\n")
            return
        context.resize(self._concurrency)


def job_of(event: Any, context: Context) -> dict[str, Any]:
    """The job as RunPod's handlers get it: the caller's envelope, or one around a bare input, with the job's id."""
    given = context.extra.get("job") or {}
    job = dict(event) if is_envelope(event, context.extra) else {"input": event}
    return {**job, **given, "id": given.get("id") or context.id}


def _piece(piece: Any) -> Any:
    if isinstance(piece, dict) and piece.get("error"):
        raise _failed(piece["error"], {key: value for key, value in piece.items() if key != "error"})
    return piece


def _failed(error: Any, rest: Mapping[str, Any]) -> HandlerFailed:
    """What the handler says went wrong, in its own words."""
    text = error if isinstance(error, str) else json.dumps(error, default=str)
    return HandlerFailed(
        text, details={"returned": json.loads(json.dumps(rest, default=str))} if rest else {}
    )


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _nobody(*_: Any) -> Any:
    raise HandlerSignatureError("There is no handler yet.", remedy=_REMEDY)
