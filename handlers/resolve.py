"""Finds the handler in a user's file, and everything about it that can be known without calling it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import PydanticUserError
from pydantic.errors import PydanticSchemaGenerationError

from ..errors import HandlerImportError, HandlerSignatureError
from .codec import InputCodec, OutputCodec
from .contract import BATCH_MARK, BatchSpec
from .dialect import DEFAULT, OWN, OWN_NAME, Entry, parse_reference
from .handler import Handler, HandlerKind, Hook, kind_of, written
from .loading import import_file

HOOKS = ("build", "forked", "rehearse", "setup", "teardown", "park", "unpark")


def resolve(root: Path, reference: str = DEFAULT, function: str = "", resolver: str = "") -> Handler:
    """Return the handler that `reference` names below `root`: "file.py", "file.py:name" or "runpod:file.py".

    `resolver` is the `Dialect.resolver` of another platform's handler. `function` is the function's name, which some
    platforms' handlers can read. The import runs in the working directory of this process. Raise HandlerImportError if the file cannot be imported, HandlerSignatureError if it has no
    usable handler.
    """
    entry = parse_reference(reference)
    if entry.dialect not in ("", OWN) and not resolver:
        fault = f"The handler is {entry.dialect}'s, and no such dialect is installed."
        raise HandlerSignatureError(
            fault, remedy="Install the plugin of this dialect, and list it in `plugins`."
        )
    if resolver:
        return _resolver(entry, resolver)(root, entry, function)
    return handler_of(import_file(root, root / entry.file), entry.name or OWN_NAME, entry.file)


def _resolver(entry: Entry, resolver: str) -> Callable[[Path, Entry, str], Handler]:
    """Return the function of a dialect's plugin. Raise HandlerImportError if its package is not installed here."""
    module, _, name = resolver.partition(":")
    try:
        return typing.cast("Callable[[Path, Entry, str], Handler]", getattr(import_module(module), name))
    except (ImportError, AttributeError) as error:
        fault = f"The dialect {entry.dialect!r} cannot be loaded from {resolver} in the function's environment: {error}."
        remedy = "Add the package of this dialect to requirements.txt, or to the image."
        raise HandlerImportError(fault, remedy=remedy) from error


def handler_of(module: ModuleType, name: str, file: str) -> Handler:
    """Return the handler called `name` in `module`, with the module's hooks. `file` is the module's name in messages.

    Raise HandlerSignatureError if there is no such handler, or if the handler or a hook cannot be used.
    """
    call = getattr(module, name, None)
    if call is None:
        remedy = f"Define `def {name}(event): ...` in it, or set `handler` to file.py:name."
        raise HandlerSignatureError(f"{file} defines no `{name}`.", remedy=remedy)
    if not callable(call) or isinstance(call, type):
        fault = f"`{name}` in {file} is {_a(call)}, not a function."
        raise HandlerSignatureError(fault, remedy=f"Define `def {name}(event): ...`.")
    _refuse_app(call, name, file)
    kind, spec = kind_of(call), getattr(call, BATCH_MARK, None)
    takes_context = _arity(call, f"{name} in {file}") == 2
    codecs = _codecs(call, kind, spec, f"{name} in {file}")
    if spec and kind.streaming:
        fault = f"`{name}` in {file} is a generator with @batch."
        raise HandlerSignatureError(fault, remedy="Stream or batch: remove one of the two.")
    hooks: dict[str, Any] = {hook: _hook(module, hook, file) for hook in HOOKS}
    return Handler(call, kind, *codecs, takes_context, spec, entry=f"{file}:{name}", **hooks)


def _refuse_app(call: Callable[..., Any], name: str, file: str) -> None:
    """Raise HandlerSignatureError, which names the setting for web apps, if the names of its parameters show that `call` is a web app."""
    names = inspect.signature(call).parameters
    if key := "asgi" if {"receive", "send"} <= names.keys() else "wsgi" if "start_response" in names else "":
        app = f"{file.removesuffix('.py').replace('/', '.')}:{name}"
        fault = f"`{name}` in {file} is a web app, not a function of an event."
        raise HandlerSignatureError(
            fault, remedy=f'Set {key} = "{app}" instead of handler in pilotflame.toml.'
        )


def _arity(call: Callable[..., Any], what: str, *, allowed: tuple[int, ...] = (1, 2)) -> int:
    """Return the largest number of positional arguments in `allowed` that `call` accepts.

    Raise HandlerSignatureError, which names `what`, if it accepts none of these numbers.
    """
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
        fault = f"`{name}` in {file} is {_a(call)}, not a function."
        raise HandlerSignatureError(fault, remedy=f"Rename it: `{name}` is a hook.")
    kind = kind_of(call)
    plain = name in ("build", "forked")
    if kind.streaming or (plain and kind is HandlerKind.ASYNC):
        remedy = "Make it a plain function." if plain else "Make it a plain or async function."
        raise HandlerSignatureError(f"`{name}` in {file} is {kind.value.replace('_', ' ')}.", remedy=remedy)
    if _arity(call, f"{name} in {file}", allowed=(0, 1)) == 1:
        return typing.cast("Hook", call)
    return lambda _context: call()


def _codecs(
    call: Callable[..., Any], kind: HandlerKind, spec: BatchSpec | None, what: str
) -> tuple[InputCodec, OutputCodec]:
    first = next(iter(inspect.signature(call).parameters))
    try:
        hints = _hints(written(call), (first, "return"))
        event, answer = hints.get(first), hints.get("return")
        if kind.streaming or spec:
            answer = _element(answer)
        answer = None if _names_arrays(answer) else _meaningful(answer)
        return InputCodec(_meaningful(_element(event) if spec else event)), OutputCodec(answer)
    except (NameError, SyntaxError, TypeError, PydanticUserError, PydanticSchemaGenerationError) as error:
        fault = f"The annotations of `{what}` cannot be used: {error}"
        remedy = "Annotate with types that pydantic knows, or leave the annotation out."
        raise HandlerSignatureError(fault, remedy=remedy) from None


def _hints(function: Callable[..., Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the annotations of the parameters `names`.

    Other annotations are not evaluated: the type of `context`, for example, may exist for type checkers only.
    """
    annotations = getattr(function, "__annotations__", {})
    part = SimpleNamespace(
        __annotations__={name: annotations[name] for name in names if name in annotations},
        __globals__=getattr(inspect.unwrap(function), "__globals__", {}),
    )
    return typing.get_type_hints(part, include_extras=True)


def _element(annotation: Any) -> Any:
    """Return T for list[T], Iterator[T], Generator[T, …] or AsyncIterator[T], and None without a T."""
    return next(iter(typing.get_args(annotation)), None)


def _meaningful(annotation: Any) -> Any | None:
    return None if annotation in (None, type(None), Any, object, inspect.Parameter.empty) else annotation


def _names_arrays(annotation: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Return True if the annotation contains arrays or tensors, which pydantic does not know."""
    kind = typing.get_origin(annotation) or annotation
    if kind in seen:
        return False
    bases = kind.__mro__ if isinstance(kind, type) else ()
    arrays = {("numpy", "ndarray"), ("torch", "Tensor")}
    if any((base.__module__, base.__name__) in arrays for base in bases):
        return True
    # numpy's NDArray is an alias made by `type` from numpy 2.5 on. Such an alias may contain itself.
    alias = None if isinstance(kind, type) else getattr(kind, "__value__", None)
    if alias is not None and _names_arrays(alias, (*seen, kind)):
        return True
    return any(_names_arrays(part, seen) for part in typing.get_args(annotation))


def _a(value: object) -> str:
    name = "class" if isinstance(value, type) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
