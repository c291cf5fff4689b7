"""Adapting a foreign handler: building the Handler, with codecs as lenient as the foreign platforms are."""

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
    """Any JSON. The schema is only published; the dialect checks inputs itself, after removing their envelope."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__(None)
        self._schema = dict(schema)

    def schema(self) -> dict[str, Any]:
        return self._schema


class LenientOutput(OutputCodec):
    """Any output that `json.dumps` accepts, such as keys that are numbers. Bytes stay bytes."""

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
                # The first error names the path of the fault.
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
    """Return the Handler of a foreign `call`, which receives the event and the context."""
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
    """Return the output of a plain handler, after running it in a new event loop if it is awaitable."""

    async def run() -> Any:
        return await output

    return asyncio.run(run()) if inspect.isawaitable(output) else output


def of_kind(kind: HandlerKind, *calls: Callable[..., Any]) -> Callable[..., Any]:
    """Return the one of four `calls`, a plain, an async, a generator and an async generator one, that is of `kind`."""
    return calls[list(HandlerKind).index(kind)]
