"""Builds the Handler for a foreign handler, with codecs that accept all that the foreign platforms accept."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import OutputInvalid
from ..codec import InputCodec, OutputCodec
from ..handler import Handler, HandlerKind, Hook
from .recognise import Entry


class DeclaredInput(InputCodec):
    """Accepts any JSON, and publishes the given schema.

    It does not check inputs: the dialect does, after it has removed their envelope.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__(None)
        self._schema = dict(schema)

    def schema(self) -> dict[str, Any]:
        return self._schema


class LenientOutput(OutputCodec):
    """Encodes any output that `json.dumps` accepts, such as numbers as keys. Bytes are sent unchanged."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__(None)
        self._schema = dict(schema)

    def schema(self) -> dict[str, Any]:
        return self._schema

    def encode(self, answer: Any, accept: str = "") -> tuple[bytes, str]:
        try:
            return super().encode(answer, accept)
        except OutputInvalid as error:
            try:
                plain = json.loads(json.dumps(answer, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                # Raise the first error, because it names the path of the fault.
                raise error from None
            return super().encode(plain, accept)


def adapt(
    entry: Entry,
    kind: HandlerKind,
    call: Callable[..., Any],
    *,
    input_codec: InputCodec | None = None,
    output_schema: Mapping[str, Any] | None = None,
    setup: Hook | None = None,
    aggregate: bool = True,
) -> Handler:
    """Return a Handler that calls `call(event, context)` for the foreign handler at `entry`."""
    return Handler(
        call=call,
        kind=kind,
        takes_context=True,
        batch=None,
        input=input_codec or InputCodec(None),
        output=LenientOutput(output_schema or {}),
        build=None,
        rehearse=None,
        setup=setup,
        teardown=None,
        dialect=entry.dialect,
        entry=entry.label,
        aggregate=aggregate,
    )


def awaited(output: Any) -> Any:
    """Return `output`, which a plain handler returned. If it is awaitable, return its result.

    An awaitable is run in a new event loop, so the thread must not have one that runs.
    """

    async def run() -> Any:
        return await output

    return asyncio.run(run()) if inspect.isawaitable(output) else output


def of_kind(kind: HandlerKind, *calls: Callable[..., Any]) -> Callable[..., Any]:
    """Return the one of `calls` for `kind`.

    There are four, in this order: for plain, async, generator and async generator handlers.
    """
    return calls[list(HandlerKind).index(kind)]
