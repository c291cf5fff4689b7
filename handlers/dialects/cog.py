"""Runs handlers that follow Cog's contract: a class in predict.py with `setup()` and `predict(**inputs)`."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import HandlerSignatureError
from ..codec import InputCodec
from ..contract import Context
from ..handler import Handler, HandlerKind, Hook, kind_of
from ..loading import import_file
from .adapter import LenientOutput, awaited, of_kind
from .cog_inputs import CogInputs
from .cog_sdk import CONCURRENCY_MARK, stand_in
from .files import InputFiles, with_data_urls
from .recognise import Entry
from .stand_in import is_installed

# Types of outputs that cannot contain a file.
PLAIN = (str, int, float, bool, bytes, type(None))


def resolve_cog(root: Path, entry: Entry) -> Handler:
    """Import the predictor that `entry` names and return its Handler.

    Raises HandlerImportError if that fails, HandlerSignatureError if the predictor cannot be used.
    """
    predictor = Predictor(import_file(root, root / entry.file, prepare=_provide_cog), entry)
    inputs, setup = predictor.inputs, predictor.setup
    codecs = InputCodec(None, inputs.schema), LenientOutput(None, inputs.output_schema)
    return Handler(
        predictor.caller, predictor.kind, *codecs, setup=setup, dialect=entry.dialect, entry=entry.label
    )


def _provide_cog() -> None:
    if not is_installed("cog"):
        sys.modules.update(stand_in())


class Predictor:
    """The user's class or function that makes predictions: its inputs, and how to call it.

    For a class, `setup` returns the instance of each worker.
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
        self.caller = of_kind(self.kind, self._run, self._run_async, self._stream, self._stream_async)

    def _predict(self, instance: Any) -> Callable[..., Any]:
        if not self._method:
            return self._target  # type: ignore[no-any-return]
        method = inspect.getattr_static(self._target, self._method)
        return method.__get__(instance, self._target)  # type: ignore[no-any-return]

    def _set_up(self, context: Context) -> Any:
        instance = self._target()
        concurrency = getattr(self._predict(instance), CONCURRENCY_MARK, 1)
        if concurrency > 1 and self.kind.on_loop:
            context.resize(concurrency)
        setup = getattr(instance, "setup", None)
        if setup is None:
            return instance
        weights = {"weights": _weights(setup)} if "weights" in inspect.signature(setup).parameters else {}
        done = setup(**weights)
        return _after(done, instance) if inspect.isawaitable(done) else instance

    def _run(self, event: Any, context: Context) -> Any:
        with InputFiles(context.remaining_ms) as files:
            output = self._predict(context.state)(**self.inputs.arguments(event, context.extra, files))
            return with_data_urls(awaited(output))

    async def _run_async(self, event: Any, context: Context) -> Any:
        with InputFiles(context.remaining_ms) as files:
            arguments = await self._arguments_async(event, context, files)
            return await _with_data_urls_async(await self._predict(context.state)(**arguments))

    def _stream(self, event: Any, context: Context) -> Iterator[Any]:
        with InputFiles(context.remaining_ms) as files:
            pieces = self._predict(context.state)(**self.inputs.arguments(event, context.extra, files))
            # A plain function may return an iterator that has no `close`.
            with closing(pieces) if hasattr(pieces, "close") else nullcontext():
                for piece in pieces:
                    yield with_data_urls(piece)

    async def _stream_async(self, event: Any, context: Context) -> AsyncIterator[Any]:
        with InputFiles(context.remaining_ms) as files:
            arguments = await self._arguments_async(event, context, files)
            async with aclosing(self._predict(context.state)(**arguments)) as pieces:
                async for piece in pieces:
                    yield await _with_data_urls_async(piece)

    async def _arguments_async(self, event: Any, context: Context, files: InputFiles) -> dict[str, Any]:
        if self.inputs.has_files:
            return await asyncio.to_thread(self.inputs.arguments, event, context.extra, files)
        return self.inputs.arguments(event, context.extra, files)


def _method_name(target: Any, label: str) -> str:
    """Return the name of the method of class `target` that makes predictions, or "" if it is a function."""
    if not isinstance(target, type):
        return ""
    for name in ("predict", "run"):
        owner = next((base for base in target.__mro__ if name in vars(base)), None)
        # A method that is only inherited from the base classes of cog or of its stand-in does not count.
        if owner is not None and owner.__module__.split(".")[0] not in ("cog", __name__.split(".")[0]):
            return name
    remedy = "Define `def predict(self, …)` in it, as Cog requires."
    raise HandlerSignatureError(f"{label} has no method `predict`.", remedy=remedy)


def _kind(predict: Callable[..., Any], returned: Any) -> HandlerKind:
    """Return the kind of `predict`. A plain function annotated to return an iterator is a generator."""
    kind = kind_of(predict)
    origin = typing.get_origin(returned) or returned
    if kind is HandlerKind.PLAIN and isinstance(origin, type) and issubclass(origin, Iterator):
        return HandlerKind.GENERATOR
    return kind


def _weights(setup: Callable[..., Any]) -> Any:
    """Return the argument `weights` for `setup` as Cog does: COG_WEIGHTS, the path `weights`, or None."""
    if named := os.environ.get("COG_WEIGHTS"):
        return named
    path = Path("weights")
    if not path.exists():
        return None
    wanted = inspect.signature(setup).parameters["weights"].annotation
    return str(path) if wanted is str else path


async def _after(awaitable: Any, instance: Any) -> Any:
    await awaitable
    return instance


async def _with_data_urls_async(output: Any) -> Any:
    """Return the output with its files as data URLs. A thread reads them."""
    return output if isinstance(output, PLAIN) else await asyncio.to_thread(with_data_urls, output)
