"""Defines Handler: the runtime's description of a user's handler, in the same form for all dialects."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from dataclasses import dataclass
from typing import Any

from ..errors import OutputInvalid
from .codec import InputCodec, OutputCodec
from .contract import BatchSpec, Context

Hook = Callable[..., Any]
# Types that have a length but are not sequences of answers.
ONE_VALUE = (str, bytes, bytearray, Mapping, Set)


class HandlerKind(enum.StrEnum):
    """Whether a handler is a function or a generator, plain or async."""

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
    """A user's handler: its function and hooks, and the codecs of its events and answers."""

    call: Callable[..., Any]
    kind: HandlerKind
    input: InputCodec
    output: OutputCodec
    takes_context: bool = True
    batch: BatchSpec | None = None
    build: Hook | None = None
    forked: Hook | None = None
    rehearse: Hook | None = None
    setup: Hook | None = None
    teardown: Hook | None = None
    park: Hook | None = None
    unpark: Hook | None = None
    dialect: str = "pilotflame"
    """The contract that the user's file follows: "pilotflame", or the name of a Dialect."""
    entry: str = ""
    """Where the handler was found: "file.py:name", or the file alone."""
    aggregate: bool = True
    """True if a job of a streaming handler stores the list of all pieces as its output."""
    exchanges: bool = False
    """True if an async handler uses `context.exchange`. When the caller goes, such a call is not cancelled: the handler learns
    it from the exchange. Such calls may last for hours, so the gateway sends a call only to a worker with a free slot."""

    def facts(self) -> dict[str, Any]:
        """Return the properties of the handler that the gateway needs, as plain JSON."""
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

    def arguments(self, context: Context, event: Any) -> tuple[Any, ...]:
        """Return the arguments of one handler call. For a batch handler, `event` is a list of events."""
        return (event, context) if self.takes_context else (event,)

    def answers(self, answer: Any, count: int) -> list[Any]:
        """Return a list with one answer per event. `answer` is the return value of one handler call.

        Raise OutputInvalid if a batch handler did not return exactly `count` answers.
        """
        if self.batch is None:
            return [answer]
        if not isinstance(answer, ONE_VALUE) and isinstance(answer, Sized) and isinstance(answer, Iterable):
            # If the answer is an array, for example, its rows are the answers.
            answer = list(answer)
        if not isinstance(answer, list) or len(answer) != count:
            got = f"{len(answer)} answers" if isinstance(answer, list) else type(answer).__name__
            fault = f"The batch handler was given {count} events and returned {got}."
            raise OutputInvalid(fault, remedy="Return a list with one answer for each event, in order.")
        return answer


def kind_of(call: Callable[..., Any]) -> HandlerKind:
    """Return the kind of the handler function `call`, without calling it."""
    function = written(call)
    if inspect.isasyncgenfunction(function):
        return HandlerKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return HandlerKind.GENERATOR
    return HandlerKind.ASYNC if inspect.iscoroutinefunction(function) else HandlerKind.PLAIN


def written(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or `__call__` method that the user wrote, without partials and decorators."""
    inner: Any = call
    while isinstance(inner, functools.partial):
        inner = inner.func
    function: Callable[..., Any] = inspect.unwrap(inner if inspect.isroutine(inner) else inner.__call__)
    return function
