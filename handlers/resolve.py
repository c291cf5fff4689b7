"""Finds the handler in a user's file and learns all that can be known without calling it."""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import PydanticUserError
from pydantic.errors import PydanticSchemaGenerationError

from ..errors import HandlerImportError, HandlerSignatureError
from .codec import InputCodec, OutputCodec
from .contract import BATCH_MARK, BatchSpec
from .failure import explain

Hook = Callable[..., Any]


class Kind(enum.StrEnum):
    """How a handler runs."""

    PLAIN = "plain"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async_generator"

    @property
    def streaming(self) -> bool:
        return self in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)

    @property
    def on_loop(self) -> bool:
        """True if the handler runs on the event loop, False if it needs a thread."""
        return self in (Kind.ASYNC, Kind.ASYNC_GENERATOR)


@dataclass(frozen=True, slots=True)
class Handler:
    """A user's handler, resolved: the callables, and what they take and give."""

    call: Callable[..., Any]
    kind: Kind
    takes_context: bool
    batch: BatchSpec | None
    input: InputCodec
    output: OutputCodec
    build: Hook | None
    rehearse: Hook | None
    setup: Hook | None
    teardown: Hook | None

    def facts(self) -> dict[str, Any]:
        """What the gateway keeps of it: plain JSON."""
        return {
            "kind": self.kind.value,
            "streaming": self.kind.streaming,
            "batch": self.batch.max_size if self.batch else None,
            "input_schema": self.input.schema(),
            "output_schema": self.output.schema(),
        }


def resolve(root: Path, reference: str = "handler.py") -> Handler:
    """Imports `reference` ("file.py" or "file.py:name") below `root` and returns its handler.

    The folder becomes the working directory and the first entry of `sys.path`, as if the user had run it there.
    Raises HandlerImportError or HandlerSignatureError.
    """
    file, _, name = reference.partition(":")
    module = _import(root, root / file)
    return handler_of(module, name or "handler", file)


def handler_of(module: ModuleType, name: str, file: str) -> Handler:
    """The handler called `name` in `module`, with the module's hooks."""
    call = getattr(module, name, None)
    if call is None:
        raise HandlerSignatureError(
            f"{file} defines no `{name}`.",
            remedy=f"Define `def {name}(event): ...` in it, or set `handler` to file.py:name.",
        )
    if not callable(call) or isinstance(call, type):
        raise HandlerSignatureError(
            f"`{name}` in {file} is {_a(call)}, not a function.", remedy=f"Define `def {name}(event): ...`."
        )
    kind, spec = _kind(call), getattr(call, BATCH_MARK, None)
    takes_context = _arity(call, f"{name} in {file}") == 2
    given, answered = _annotations(call, kind, spec, f"{name} in {file}")
    if spec and kind.streaming:
        raise HandlerSignatureError(
            f"`{name}` in {file} is a generator with @batch.",
            remedy="Stream or batch: remove one of the two.",
        )
    hooks = {hook: _hook(module, hook, file) for hook in ("build", "rehearse", "setup", "teardown")}
    return Handler(call, kind, takes_context, spec, given, answered, **hooks)


def _import(root: Path, path: Path) -> ModuleType:
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) if root.is_dir() else "nothing"
        raise HandlerImportError(
            f"{path.name} is not in the function's folder (there: {there or 'nothing'}).",
            remedy="Create it with `def handler(event): ...`, or set `handler` in pilotlight.toml.",
        )
    os.chdir(root)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise HandlerImportError(f"{path.name} is not a Python file.", remedy="Name a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import would: annotations and dataclasses look the module up
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        remedy = (
            f"Add the package that provides `{error.name}` to requirements.txt and deploy with --install."
        )
        raise explain(HandlerImportError, f"Importing {path.name}", error, root, remedy=remedy) from error
    except (Exception, SystemExit) as error:
        raise explain(HandlerImportError, f"Importing {path.name}", error, root) from error
    return module


def _kind(call: Callable[..., Any]) -> Kind:
    function = _function(call)
    if inspect.isasyncgenfunction(function):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return Kind.GENERATOR
    return Kind.ASYNC if inspect.iscoroutinefunction(function) else Kind.PLAIN


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function that was written, below partials, decorators that say so, and `__call__`."""
    while isinstance(call, functools.partial):
        call = call.func
    written: Any = call
    return typing.cast(
        "Callable[..., Any]", inspect.unwrap(written if inspect.isroutine(call) else written.__call__)
    )


def _arity(call: Callable[..., Any], what: str, *, allowed: tuple[int, ...] = (1, 2)) -> int:
    """With how many positional arguments `call` wants to be called: the largest allowed number that fits."""
    signature = inspect.signature(call)
    for count in sorted(allowed, reverse=True):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    wants = "(event) or (event, context)" if 2 in allowed else "(context) or ()"
    raise HandlerSignatureError(f"`{what}` is defined as {signature}.", remedy=f"It must take {wants}.")


def _hook(module: ModuleType, name: str, file: str) -> Hook | None:
    call = getattr(module, name, None)
    if call is None:
        return None
    if not callable(call):
        raise HandlerSignatureError(
            f"`{name}` in {file} is {_a(call)}, not a function.", remedy=f"Rename it: `{name}` is a hook."
        )
    kind = _kind(call)
    if kind.streaming or (name == "build" and kind is Kind.ASYNC):
        raise HandlerSignatureError(
            f"`{name}` in {file} is {kind.value.replace('_', ' ')}.",
            remedy="Make it a plain function." if name == "build" else "Make it a plain or async function.",
        )
    if _arity(call, f"{name} in {file}", allowed=(0, 1)) == 1:
        return typing.cast("Hook", call)
    return lambda _context: call()


def _annotations(
    call: Callable[..., Any], kind: Kind, spec: BatchSpec | None, what: str
) -> tuple[InputCodec, OutputCodec]:
    first = next(iter(inspect.signature(call).parameters))
    try:
        hints = _hints(_function(call), (first, "return"))
        given, answered = hints.get(first), hints.get("return")
        if kind.streaming or spec:
            answered = _element(answered)
        return InputCodec(_meaningful(_element(given) if spec else given)), OutputCodec(_meaningful(answered))
    except (NameError, SyntaxError, TypeError, PydanticUserError, PydanticSchemaGenerationError) as error:
        raise HandlerSignatureError(
            f"The annotations of `{what}` cannot be used: {error}",
            remedy="Annotate with types that pydantic knows, or leave the annotation out.",
        ) from None


def _hints(function: Callable[..., Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The annotations of these names alone: that of `context` is often known to type checkers only."""
    written = getattr(function, "__annotations__", {})
    part = SimpleNamespace(
        __annotations__={name: written[name] for name in names if name in written},
        __globals__=getattr(inspect.unwrap(function), "__globals__", {}),
    )
    return typing.get_type_hints(part, include_extras=True)


def _element(annotation: Any) -> Any:
    """T of list[T], Iterator[T], Generator[T, …], AsyncIterator[T]."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments else None


def _meaningful(annotation: Any) -> Any | None:
    return None if annotation in (None, type(None), Any, object, inspect.Parameter.empty) else annotation


def _a(value: object) -> str:
    name = "class" if isinstance(value, type) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
