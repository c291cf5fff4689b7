"""Defines the code that the dialects share: a codec of outputs, and helpers to call handlers of all kinds."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

from ..errors import OutputInvalid
from .codec import OutputCodec
from .handler import HandlerKind


class LenientOutput(OutputCodec):
    """Encodes any output that `json.dumps` accepts, such as numbers as keys. Bytes are sent unchanged."""

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


def awaited(output: Any) -> Any:
    """Return `output` or, if it is awaitable, its result. An awaitable runs in a new event loop of this thread.

    The thread's own event loop stays set. `asyncio.run` would remove it, and a later `asyncio.get_event_loop()` would raise.
    """

    async def run() -> Any:
        return await output

    if not inspect.isawaitable(output):
        return output
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(run())


def of_kind(kind: HandlerKind, *calls: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call for `kind`. `calls` has one call for each member of HandlerKind, in their order."""
    return calls[list(HandlerKind).index(kind)]
