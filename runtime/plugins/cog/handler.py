"""Runs handlers that follow Cog's contract: a class in predict.py with `setup()` and `predict(**inputs)`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import os
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ....errors import HandlerSignatureError, OutputInvalid
from ....foreign_json import first_errors
from ....handlers.codec import InputCodec
from ....handlers.contract import Context
from ....handlers.dialect import Entry
from ....handlers.dialect_calls import LenientOutput, awaited, of_kind
from ....handlers.files import InputFiles, text_of, with_urls
from ....handlers.handler import Handler, HandlerKind, Hook, kind_of, written
from ....handlers.loading import import_file
from ....handlers.stand_in import is_installed, provide
from .inputs import CogInputs, output_adapter
from .metrics import CogMetrics
from .sdk import CONCURRENCY_MARK, stand_in
from .uploads import Uploader

# Types of outputs that cannot contain a file.
PLAIN = (str, int, float, bool, bytes, type(None))


def resolve_cog(root: Path, entry: Entry, _function: str = "") -> Handler:
    """Import the predictor that `entry` names and return its Handler.

    Raise HandlerImportError if the import fails, HandlerSignatureError if the predictor cannot be used.
    """
    predictor = Predictor(import_file(root, root / entry.file, prepare=_provide_cog), entry)
    inputs, setup = predictor.inputs, predictor.setup
    codecs = InputCodec(None, inputs.schema), LenientOutput(None, inputs.output_schema)
    return Handler(
        predictor.caller, predictor.kind, *codecs, setup=setup, teardown=predictor.tear_down if setup else None,
        dialect=entry.dialect, entry=entry.label,
    )  # fmt: skip


def _provide_cog() -> None:
    if not is_installed("cog"):
        provide(stand_in(), __file__)


class Predictor:
    """The user's class or function that makes predictions, its inputs, and the methods that call it.

    If it is a class, `setup` returns its instance, and each worker has an instance of its own.
    """

    def __init__(self, module: ModuleType, entry: Entry) -> None:
        self._target: Any = getattr(module, entry.name, None)
        label = f"`{entry.name}` in {entry.file}"
        if not callable(self._target):
            remedy = 'Name the class in pilotflame.toml, as `handler = "cog:predict.py:Predictor"`.'
            raise HandlerSignatureError(f"{entry.file} defines no {entry.name!r} to call.", remedy=remedy)
        self._method = _method_name(self._target, label)
        predict = self._predict(object())
        self.inputs = CogInputs(predict, label)
        self.kind = _kind(predict, self.inputs.returned)
        self.setup: Hook | None = self._set_up if self._method else None
        self._weights = InputFiles()
        self._answers = Answers(self.inputs.returned)
        self._scope = _scope()
        self.caller = of_kind(self.kind, self._run, self._run_async, self._stream, self._stream_async)

    def _predict(self, instance: Any) -> Callable[..., Any]:
        if not self._method:
            return self._target  # type: ignore[no-any-return]
        method = inspect.getattr_static(self._target, self._method)
        return method.__get__(instance, self._target)  # type: ignore[no-any-return]

    def _set_up(self, context: Context) -> Any:
        instance = self._target()
        concurrency = getattr(self._predict(instance), CONCURRENCY_MARK, 0) or _concurrency()
        if concurrency > 1 and self.kind.on_loop:
            context.resize(concurrency)
        setup = getattr(instance, "setup", None)
        if setup is None:
            return instance
        parameter = inspect.signature(setup).parameters.get("weights")
        weights = {} if parameter is None else {"weights": weights_for(setup, self._weights)}
        done = setup(**weights)
        return _after(done, instance) if inspect.isawaitable(done) else instance

    def tear_down(self, _context: Context) -> None:
        """Delete the weights that the predictor's `setup` has received."""
        self._weights.close()

    def _run(self, event: Any, context: Context) -> Any:
        with self._files(context) as files:
            output = self._predict(context.state)(**self.inputs.arguments(event, context.extra, files))
            return self._answers.whole(awaited(output), context)

    async def _run_async(self, event: Any, context: Context) -> Any:
        with self._files(context) as files:
            arguments = await self._arguments_async(event, context, files)
            output = await self._predict(context.state)(**arguments)
            if isinstance(output, PLAIN):
                return self._answers.whole(output, context)
            return await asyncio.to_thread(self._answers.whole, output, context)

    def _stream(self, event: Any, context: Context) -> Iterator[Any]:
        with self._files(context) as files:
            pieces = self._predict(context.state)(**self.inputs.arguments(event, context.extra, files))
            # A plain function may return an iterator that has no `close`.
            with closing(pieces) if hasattr(pieces, "close") else nullcontext():
                for piece in pieces:
                    yield self._answers.piece(piece, context)

    async def _stream_async(self, event: Any, context: Context) -> AsyncIterator[Any]:
        with self._files(context) as files:
            arguments = await self._arguments_async(event, context, files)
            async with aclosing(self._predict(context.state)(**arguments)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, PLAIN):
                        yield self._answers.piece(piece, context)
                    else:
                        yield await asyncio.to_thread(self._answers.piece, piece, context)

    def _files(self, context: Context) -> InputFiles:
        """Return the files of a prediction, and open its scope. When the files are closed, the scope ends, too."""
        about = _about(context)
        files = InputFiles(context.remaining_ms, about.get("files"))
        if self._scope is not None:
            metrics = CogMetrics()
            files.callback(_report, context, metrics)
            files.enter_context(self._scope(about.get("context") or {}, metrics))
        return files

    async def _arguments_async(self, event: Any, context: Context, files: InputFiles) -> dict[str, Any]:
        if self.inputs.has_files:
            return await asyncio.to_thread(self.inputs.arguments, event, context.extra, files)
        return self.inputs.arguments(event, context.extra, files)


class Answers:
    """Checks outputs against the predictor's return annotation, and replaces their files by URLs."""

    def __init__(self, returned: Any) -> None:
        self._adapter = output_adapter(returned)
        self._is_text = returned is str

    def whole(self, output: Any, context: Context) -> Any:
        """Return the output, with URLs for its files. Raise OutputInvalid if it is wrong or a file cannot be sent."""
        self._check(output)
        # Bytes are text if the return annotation is `str`. Otherwise they are the body of the response.
        if isinstance(output, bytes):
            return text_of(output) if self._is_text else output
        return output if isinstance(output, PLAIN) else with_urls(output, publish=_publisher(context))

    def piece(self, piece: Any, context: Context) -> Any:
        """Return a piece of a streamed output. Raise OutputInvalid if it is wrong or a file cannot be sent."""
        self._check(piece)
        return with_urls(piece, publish=_publisher(context))

    def _check(self, output: Any) -> None:
        if self._adapter is None:
            return
        try:
            self._adapter.validate_python(output)
        except ValidationError as error:
            # Cog checks arrays and enumerations after it has converted them to JSON. So check the JSON, too.
            if not _fits_as_json(self._adapter, output):
                wrong = first_errors(error, 1)[0]
                where = "".join(f".{step}" for step in wrong["loc"])
                fault = f"The output does not fit the predictor's return annotation: output{where}: {wrong['msg']}."
                remedy = "Return what the annotation says, or annotate with Any."
                raise OutputInvalid(fault, remedy=remedy) from None


def _fits_as_json(adapter: TypeAdapter[Any], output: Any) -> bool:
    try:
        payload, _ = LenientOutput(None).encode(with_urls(output, publish=lambda file, _: str(file)))
        adapter.validate_json(payload)
    except (OutputInvalid, ValidationError):
        return False
    return True


def _about(context: Context) -> Mapping[str, Any]:
    """Return the gateway's facts about a prediction, or an empty mapping for any other invocation."""
    return context.extra.get("prediction") or {}


def _publisher(context: Context) -> Uploader | None:
    return Uploader.of(_about(context), context, os.environ)


def _scope() -> Callable[[Mapping[str, str], CogMetrics], AbstractContextManager[None]] | None:
    """Return a function that opens a scope with a context and metrics.

    Until that scope closes, `cog.current_scope()` returns it. Return None if the module `cog.server.scope` is missing,
    as in Cog 0.17 and later.
    """
    try:
        scopes: Any = importlib.import_module("cog.server.scope")
    except ImportError:
        return None
    if not hasattr(scopes, "scope"):
        return None
    return lambda context, metrics: scopes.scope(
        scopes.Scope(record_metric=metrics.record, context=dict(context))
    )


def _report(context: Context, metrics: CogMetrics) -> None:
    if found := metrics.nested():
        context.metrics(found)


def _method_name(target: Any, label: str) -> str:
    """Return the name of the method of class `target` that makes predictions, or "" if `target` is a function."""
    if not isinstance(target, type):
        return ""
    for name in ("predict", "run"):
        owner = next((base for base in target.__mro__ if name in vars(base)), None)
        # Skip a method that the class only inherits from the base classes of cog or of its stand-in.
        if owner is not None and owner.__module__.split(".")[0] not in ("cog", __name__.split(".")[0]):
            return name
    remedy = "Define `def predict(self, …)` in it, as Cog requires."
    raise HandlerSignatureError(f"{label} has no method `predict`.", remedy=remedy)


def _kind(predict: Callable[..., Any], returned: Any) -> HandlerKind:
    """Return the kind of `predict`. A plain function with an iterator as its return annotation is a generator."""
    kind = kind_of(predict)
    origin = typing.get_origin(returned) or returned
    # An open file is also an iterator, but it is one output and not a stream of pieces.
    streams = isinstance(origin, type) and issubclass(origin, Iterator) and not issubclass(origin, io.IOBase)
    if kind is HandlerKind.PLAIN and streams:
        return HandlerKind.GENERATOR
    return kind


def _concurrency() -> int:
    """Return the number of predictions that an async predictor runs at once, as set in cog.yaml."""
    text = os.environ.get("COG_MAX_CONCURRENCY", "")
    return int(text) if text.isascii() and text.isdecimal() else 1


def weights_for(setup: Callable[..., Any], files: InputFiles) -> Any:
    """Return the argument `weights` for `setup` as Cog does: from COG_WEIGHTS, or else from the path `weights`.

    The parameter's annotation decides whether the argument is an open file, a path or a string. If there are no
    weights, the argument is None.
    """
    wanted = _weights_type(setup)
    named, path = os.environ.get("COG_WEIGHTS", ""), Path("weights")
    if not named and not path.exists():
        return None
    if issubclass(wanted, io.IOBase):
        return files.open(named) if named else files.enter_context(path.open("rb"))
    if issubclass(wanted, PurePath):
        return wanted(files.fetch(named) if named else path)
    # Without an annotation, or with several types, the argument is a Path.
    return named or (str(path) if wanted is str else path)


def _weights_type(setup: Callable[..., Any]) -> type:
    """Return the type of the parameter `weights`, or `object` if it has no annotation or allows several types."""
    try:
        wanted = typing.get_type_hints(written(setup)).get("weights")
    except (NameError, SyntaxError, TypeError):
        return object
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        choices = [one for one in typing.get_args(wanted) if one is not type(None)]
        wanted = choices[0] if len(choices) == 1 else object
    return wanted if isinstance(wanted, type) else object


async def _after(awaitable: Any, instance: Any) -> Any:
    await awaitable
    return instance
