"""Cog: a predict.py whose class says `setup()` and `predict(**inputs)`, run as Cog runs it."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import HandlerSignatureError
from ..contract import Context
from ..handler import Handler, HandlerKind, Hook, kind_of
from ..loading import import_file
from .bodies import LenientOutput, ShownInput
from .cog_inputs import CogInputs
from .cog_sdk import CONCURRENCY_MARK
from .files import Fetched, presented
from .recognise import Entry

WEIGHTS_FOLDER = "weights"
PLAIN = (str, int, float, bool, bytes, type(None))


def resolve_cog(root: Path, entry: Entry) -> Handler:
    """The predictor that `entry` names. Raises HandlerImportError or HandlerSignatureError."""
    module = import_file(root, root / entry.file, prepare=_provide)
    predictor = Predictor(module, entry)
    return Handler(
        call=predictor.caller,
        kind=predictor.kind,
        takes_context=True,
        batch=None,
        input=ShownInput(predictor.inputs.schema),
        output=LenientOutput(predictor.inputs.output),
        build=None,
        rehearse=None,
        setup=predictor.setup,
        teardown=None,
        dialect="cog",
        entry=entry.label,
    )


def _provide() -> None:
    """`import cog` gives the real package if it is here, else a stand-in."""
    spec = find_spec("cog") if "cog" not in sys.modules else sys.modules["cog"].__spec__
    if spec is None or spec.origin is None:  # none, or only a folder of that name
        from .cog_sdk import stand_in  # noqa: PLC0415  only where it is needed

        sys.modules.update(stand_in())


class Predictor:
    """A Cog class (or function): what it takes, and how it is called. The instance is made in each worker."""

    def __init__(self, module: ModuleType, entry: Entry) -> None:
        self._target = getattr(module, entry.name, None)
        what = f"`{entry.name}` in {entry.file}"
        if not callable(self._target):
            raise HandlerSignatureError(
                f"{entry.file} defines no {entry.name!r} to call.",
                remedy='Name the class in pilotflame.toml, as `handler = "cog:predict.py:Predictor"`.',
            )
        self._method = _method_of(self._target, what)
        predict = self._predict(object()) if self._method else self._target
        self.inputs = CogInputs(predict, what)
        self.kind = _kind(predict, self.inputs.returned)
        self.setup: Hook | None = self._set_up if self._method else None
        self.caller: Callable[..., Any] = {
            HandlerKind.PLAIN: self._answer,
            HandlerKind.ASYNC: self._answer_async,
            HandlerKind.GENERATOR: self._stream,
            HandlerKind.ASYNC_GENERATOR: self._stream_async,
        }[self.kind]

    def _predict(self, instance: Any) -> Callable[..., Any]:
        """The method, bound to `instance`; the function, if it is one."""
        if not self._method:
            return typing.cast("Callable[..., Any]", self._target)
        written = inspect.getattr_static(self._target, self._method)
        bound = written.__get__(instance, self._target)
        return typing.cast("Callable[..., Any]", bound)

    def _set_up(self, context: Context) -> Any:
        instance = typing.cast("Callable[[], Any]", self._target)()
        concurrency = getattr(self._predict(instance), CONCURRENCY_MARK, 1)
        if concurrency > 1 and self.kind.on_loop:
            context.resize(concurrency)
        setup = getattr(instance, "setup", None)
        if setup is None:
            return instance
        weights = {"weights": _weights(setup)} if "weights" in inspect.signature(setup).parameters else {}
        done = setup(**weights)
        return _after(done, instance) if inspect.isawaitable(done) else instance

    # -- predicting

    def _answer(self, event: Any, context: Context) -> Any:
        with Fetched(context.remaining_ms) as files:
            answer = self._predict(context.state)(**self._checked(event, context, files))
            if inspect.isawaitable(answer):
                answer = asyncio.run(_after(answer, None, give=True))
            return presented(answer)

    async def _answer_async(self, event: Any, context: Context) -> Any:
        with Fetched(context.remaining_ms) as files:
            answer = await self._predict(context.state)(**await self._checked_async(event, context, files))
            return await _presented(answer)

    def _stream(self, event: Any, context: Context) -> Iterator[Any]:
        with Fetched(context.remaining_ms) as files:
            pieces = self._predict(context.state)(**self._checked(event, context, files))
            try:
                for piece in pieces:
                    yield presented(piece)
            finally:
                if (close := getattr(pieces, "close", None)) is not None:
                    close()

    async def _stream_async(self, event: Any, context: Context) -> AsyncIterator[Any]:
        with Fetched(context.remaining_ms) as files:
            pieces = self._predict(context.state)(**await self._checked_async(event, context, files))
            async with aclosing(pieces):
                async for piece in pieces:
                    yield await _presented(piece)

    def _checked(self, event: Any, context: Context, files: Fetched) -> dict[str, Any]:
        return self.inputs.check(self.inputs.unwrapped(event, context.extra), files)

    async def _checked_async(self, event: Any, context: Context, files: Fetched) -> dict[str, Any]:
        if self.inputs.with_files:
            return await asyncio.to_thread(self._checked, event, context, files)
        return self._checked(event, context, files)


def _method_of(target: Any, what: str) -> str:
    """What a class calls its prediction; "" for a function."""
    if not isinstance(target, type):
        return ""
    for name in ("predict", "run"):
        owner = next((base for base in target.__mro__ if name in vars(base)), None)
        if owner is not None and owner.__module__.partition(".")[0] not in (
            "cog",
            __name__.partition(".")[0],
        ):
            return name
    raise HandlerSignatureError(
        f"{what} has no method `predict`.", remedy="Define `def predict(self, …)` in it, as Cog wants it."
    )


def _kind(predict: Callable[..., Any], returned: Any) -> HandlerKind:
    """How it runs; one that returns an iterator which it did not write as a generator streams too."""
    kind = kind_of(predict)
    if kind is not HandlerKind.PLAIN:
        return kind
    origin = typing.get_origin(returned) or returned
    streams = isinstance(origin, type) and issubclass(origin, Iterator)
    return HandlerKind.GENERATOR if streams else kind


def _weights(setup: Callable[..., Any]) -> Any:
    """What Cog gives `setup(weights)`: COG_WEIGHTS, else the folder's `weights`, else None."""
    if named := os.environ.get("COG_WEIGHTS"):
        return named
    path = Path(WEIGHTS_FOLDER)
    if not path.exists():
        return None
    wanted = inspect.signature(setup).parameters["weights"].annotation
    return str(path) if wanted is str else path


async def _after(awaitable: Any, instance: Any, *, give: bool = False) -> Any:
    """Awaits; the answer is `instance`, or with `give` what was awaited."""
    answer = await awaitable
    return answer if give else instance


async def _presented(answer: Any) -> Any:
    """Files are read in a thread; what cannot hold any needs none."""
    return answer if isinstance(answer, PLAIN) else await asyncio.to_thread(presented, answer)
