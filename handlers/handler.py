"""The handler, as resolved: a callable with what it takes and gives, whichever dialect it was written in."""

from __future__ import annotations

import enum
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .codec import InputCodec, OutputCodec
from .contract import BatchSpec

Hook = Callable[..., Any]


class HandlerKind(enum.StrEnum):
    """How a handler runs."""

    PLAIN = "plain"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async_generator"

    @property
    def streaming(self) -> bool:
        return self in (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR)

    @property
    def on_loop(self) -> bool:
        """True if the handler runs on the event loop, False if it needs a thread."""
        return self in (HandlerKind.ASYNC, HandlerKind.ASYNC_GENERATOR)


@dataclass(frozen=True, slots=True)
class Handler:
    """A user's handler, resolved: the callables, and what they take and give."""

    call: Callable[..., Any]
    kind: HandlerKind
    takes_context: bool
    batch: BatchSpec | None
    input: InputCodec
    output: OutputCodec
    build: Hook | None
    rehearse: Hook | None
    setup: Hook | None
    teardown: Hook | None
    dialect: str = "pilotflame"
    """Whose contract the user's file keeps: pilotflame's, or one of `foreign.recognise.DIALECTS`."""
    entry: str = ""
    """The file and the name in it that was found there."""
    aggregate: bool = True
    """Of a streaming handler: whether a job's stored output is the list of all pieces."""

    def facts(self) -> dict[str, Any]:
        """What the gateway keeps of it: plain JSON."""
        return {
            "dialect": self.dialect,
            "entry": self.entry,
            "kind": self.kind.value,
            "streaming": self.kind.streaming,
            "aggregate": self.aggregate,
            "batch": self.batch.max_size if self.batch else None,
            "input_schema": self.input.schema(),
            "output_schema": self.output.schema(),
        }


def kind_of(call: Callable[..., Any]) -> HandlerKind:
    """How `call` runs, without calling it."""
    function = written(call)
    if inspect.isasyncgenfunction(function):
        return HandlerKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return HandlerKind.GENERATOR
    return HandlerKind.ASYNC if inspect.iscoroutinefunction(function) else HandlerKind.PLAIN


def written(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function that was written, below partials, decorators that say so, and `__call__`."""
    while isinstance(call, functools.partial):
        call = call.func
    seen: Any = call
    return typing.cast(
        "Callable[..., Any]", inspect.unwrap(seen if inspect.isroutine(call) else seen.__call__)
    )
