"""Defines the contract: the functions that a user's handler file may define, and the context that they get.

handler(event) or handler(event, context)     plain, async, generator or async generator
build(context)      once per revision, in the zygote: imports, skeleton, tokenizer; no threads, no device
forked(context)     once per worker, right after its fork, while it has one thread: fork processes of your own, which wait until
                    `setup` needs them; no threads, no device
rehearse(context)   once per standby, with weights of zeros: one forward pass, so that later ones are faster;
                    its result is discarded, and it must not store anything computed from the weights
setup(context)      once per worker, after its weights have arrived
teardown(context)   once per worker, before it exits
park(context)       while the worker has no invocations: free device memory that belongs to no module of a snapshot,
                    such as that of another engine; it may return the number of freed bytes
unpark(context)     after `park`, before the next invocation: take the memory again; a worker that ends while it is
                    parked runs `teardown` without it
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import HandlerFailed, HandlerSignatureError, NoSuchSnapshot

if TYPE_CHECKING:
    from ..snapshot.adapters import Adapters
    from ..snapshot.handle import Snapshot
    from ..snapshot.named import Snapshots
    from .language_model.declared_prefixes import DeclaredPrefixes

BATCH_MARK = "__pilotflame_batch__"
MAX_BATCH = 4096
# Higher costs are lowered to this cost, because callers may influence costs, and sums of costs must stay finite.
MAX_COST = 1e12
NOTHING: Mapping[str, Any] = MappingProxyType({})

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The arguments that the user gave to the decorator `batch`."""

    max_size: int
    cost: Callable[[Any], float] | None = None
    max_cost: float | None = None
    examples: tuple[Any, ...] = ()

    def weigh(self, event: Any) -> float:
        """Return the cost of `event`; 1 if there is no `cost` function.

        Raise HandlerFailed if `cost` returns no positive, finite number.
        """
        if self.cost is None:
            return 1.0
        returned = self.cost(event)
        if (cost := _number(returned)) is None:
            fault = f"The cost function of @batch returned {returned!r:.80}, which is no cost."
            raise HandlerFailed(fault, remedy="Return a positive, finite number for every event.")
        return min(cost, MAX_COST)


def batch(
    *,
    max_size: int = 32,
    cost: Callable[[Any], float] | None = None,
    max_cost: float | None = None,
    example: Any = None,
) -> Callable[[F], F]:
    """Mark a handler that takes a list of events and returns a list with one answer for each, in order.

    If one of the answers is an exception instance, only its event fails. If the handler raises, it is called again with
    each half of the events, and so on, until each event that it cannot answer has failed alone. Side effects of the
    handler may therefore happen more than once.

    `cost` returns the size of an event, for example its number of tokens. `max_cost` limits the sum of the costs in one
    handler call; an event with a higher cost gets its own handler call. `example` is an event, or a list of events, as
    JSON: the first worker uses it to measure how long each batch size takes.
    """
    if not isinstance(max_size, int) or isinstance(max_size, bool) or not 1 <= max_size <= MAX_BATCH:
        fault = f"@batch(max_size={max_size!r}): max_size must be a whole number from 1 to {MAX_BATCH}."
        raise HandlerSignatureError(fault, remedy="Write for example @pilotflame.batch(max_size=32).")
    if cost is not None and (not callable(cost) or inspect.iscoroutinefunction(cost)):
        fault = f"@batch(cost={cost!r:.80}): cost must be a plain function of one event."
        remedy = "Write for example @pilotflame.batch(cost=lambda event: len(event.text))."
        raise HandlerSignatureError(fault, remedy=remedy)
    if max_cost is not None and (cost is None or _number(max_cost) is None):
        fault = f"@batch(max_cost={max_cost!r}) needs a cost function, and a positive, finite number."
        remedy = "Write for example @pilotflame.batch(cost=lambda event: len(event.text), max_cost=9000)."
        raise HandlerSignatureError(fault, remedy=remedy)
    spec = BatchSpec(max_size, cost, None if max_cost is None else float(max_cost), _examples(example))

    def mark(handler: F) -> F:
        setattr(handler, BATCH_MARK, spec)
        return handler

    return mark


def _number(value: Any) -> float | None:
    """Return `value`, a number of any library, as a float, or None if it is not a positive, finite number."""
    if isinstance(value, (bool, str, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # A tensor of several numbers raises RuntimeError.
        return None
    return number if 0 < number < math.inf else None


def _examples(example: Any) -> tuple[Any, ...]:
    examples = example if isinstance(example, list) else [example]
    try:
        json.dumps(example, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        remedy = 'Write an event as it is sent, for example @pilotflame.batch(example={"text": "Hello"}).'
        fault = f"@batch(example=…): the example is not JSON: {error}."
        raise HandlerSignatureError(fault, remedy=remedy) from None
    if not examples:
        remedy = "Name at least one event; one that is a list itself is written as [[…]]."
        raise HandlerSignatureError("@batch(example=[]): there is no event in this list.", remedy=remedy)
    return () if example is None else tuple(examples)


class Cancellation:
    """A flag that is set when the caller of an invocation goes away. Any thread may read it."""

    __slots__ = ("flag",)

    def __init__(self) -> None:
        self.flag = False


class Host(Protocol):
    """The worker as its handler sees it. `channel` identifies an invocation. Any thread may call the methods."""

    def progress(self, channel: int, value: Any) -> None: ...
    def metrics(self, channel: int, values: Mapping[str, Any]) -> None: ...
    def retire(self) -> None: ...
    def resize(self, concurrency: int) -> None: ...


class PieceExchange(Protocol):
    """The pieces that an async handler and its caller exchange while the handler runs. Only the event loop uses them.

    Dialects whose callers keep a connection open have such exchanges (`Handler.exchanges`), for example the dialect of ASGI apps.
    """

    follows: bool
    """True if the caller sends pieces of input after the event."""
    gone: bool
    """True once the caller has gone, or the invocation's time limit has passed."""
    on_gone: Callable[[], None] | None
    """Called when `gone` becomes true."""

    async def send(self, piece: bytes) -> bool:
        """Wait until the caller has read most earlier pieces, and send a piece of the output. Return False if the caller has gone.

        A piece has at most PIECE_BYTES (runtime/calls/link/stream_credit.py).
        """

    async def receive(self) -> bytes | None:
        """Return the next piece of the input; None after the last piece, or if the caller has gone."""

    def close(self) -> None:
        """End the exchange: `gone` becomes true, and waits in `send` and `receive` end."""


class Context:
    """The facts about its function and its invocation that a handler can read, and the requests that it can send to its
    worker.

    `state` is what `setup` returned, or what `build` returned if `setup` returned None. For a batch handler, `items`
    holds one context per event, in order. `extra` holds the data that a dialect or an event source adds to an
    invocation. `exchange` is None unless the caller and the handler exchange pieces. In the hooks there is no
    invocation: `id` is empty and there is no deadline. In `build` and `setup`, `prefixes` has the table
    `[prefixes]` for `language_model`; None if the settings have no such table.
    """

    __slots__ = ("_cancellation", "_channel", "_deadline_s", "_host", "_snapshots", "attempt", "exchange", "extra",
                 "function", "id", "items", "prefixes", "revision", "state", "traceparent", "tracestate")  # fmt: skip

    def __init__(
        self, function: str, revision: str, *, invocation_id: str = "", attempt: int = 1,
        deadline_s: float | None = None, state: Any = None, snapshots: Snapshots | None = None,
        cancellation: Cancellation | None = None, traceparent: str = "", items: Sequence[Context] = (),
        extra: Mapping[str, Any] = NOTHING, host: Host | None = None, channel: int = 0,
        exchange: PieceExchange | None = None, tracestate: str = "", prefixes: DeclaredPrefixes | None = None,
    ) -> None:  # fmt: skip
        self.function = function
        self.revision = revision
        self.id = invocation_id
        self.attempt = attempt
        self.state = state
        self.traceparent, self.tracestate = traceparent, tracestate
        self.items = items
        self.extra = extra
        self.exchange = exchange
        self.prefixes = prefixes
        self._host = host
        self._channel = channel
        self._deadline_s = deadline_s
        self._snapshots = snapshots
        self._cancellation = cancellation or Cancellation()

    @classmethod
    def of_batch(cls, items: Sequence[Context]) -> Context:
        """Return the context of one call of a batch handler. `items` are the contexts of its events."""
        first = items[0]
        return cls(first.function, first.revision, state=first.state, invocation_id=first.id, items=items)

    def limit(self, deadline_s: float) -> None:
        """Set the deadline, in monotonic seconds. The worker calls this when it calls the handler, because a job's time
        counts from the handler call.
        """
        self._deadline_s = deadline_s

    @property
    def deadline(self) -> float | None:
        """The deadline as a Unix timestamp in seconds, or None."""
        deadline_s = self._deadline_s
        return None if deadline_s is None else time.time() + deadline_s - time.monotonic()

    def remaining_ms(self) -> int | None:
        """Return the milliseconds until the deadline, at least 0, or None if there is no deadline."""
        deadline_s = self._deadline_s
        return None if deadline_s is None else max(0, int((deadline_s - time.monotonic()) * 1000))

    @property
    def cancelled(self) -> bool:
        """True once no answer is needed any more: every caller went away, or the deadline passed."""
        if self.items:
            return all(item.cancelled for item in self.items)
        expired = self._deadline_s is not None and time.monotonic() > self._deadline_s
        return self._cancellation.flag or expired

    def progress(self, value: Any) -> None:
        """Report the invocation's progress, as any JSON value. The job's status shows the latest report.

        Any thread may call this, and often. Without an invocation, as in `setup`, this does nothing.
        """
        for context in self.items:
            context.progress(value)
        if self._host is not None:
            self._host.progress(self._channel, value)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Report measurements of the invocation, a JSON object. The job's prediction shows the latest report."""
        for context in self.items:
            context.metrics(values)
        if self._host is not None:
            self._host.metrics(self._channel, values)

    def retire(self) -> None:
        """Let this worker accept no more invocations, and end after its running invocations are answered."""
        for context in self.items:
            context.retire()
        if self._host is not None:
            self._host.retire()

    def resize(self, concurrency: int) -> None:
        """Let this worker run `concurrency` invocations at the same time. Only for async handlers."""
        for context in self.items:
            context.resize(concurrency)
        if self._host is not None:
            self._host.resize(concurrency)

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose lines carry the invocation's id. `pilotflame logs` shows them."""
        extra = {"invocation": self.id or "-", "channel": self._channel}
        return logging.LoggerAdapter(logging.getLogger("pilotflame.handler"), extra)

    @property
    def snapshot(self) -> Snapshot:
        """The weights of the setting `snapshot`. Raises NoSuchSnapshot if the settings name no snapshot, or several
        snapshots.
        """
        found = self._all_snapshots(
            'Set `snapshot = "path/to/weights"` in pilotflame.toml, or deploy with --snapshot.'
        )
        if found.only is None:
            names = ", ".join(found)
            fault = f"Function {self.function!r} has named snapshots ({names}), but its handler asked for the only one."
            raise NoSuchSnapshot(fault, remedy=f'Write context.snapshots["{next(iter(found))}"].')
        return found.only

    @property
    def snapshots(self) -> Snapshots:
        """The weights of the table `[snapshots]`, by name. Raises NoSuchSnapshot if the settings have no such table."""
        found = self._all_snapshots('Set `[snapshots]` with `NAME = "path/to/weights"` in pilotflame.toml.')
        if found.only is not None:
            fault = f"Function {self.function!r} has one snapshot, without a name, but its handler asked for named ones."
            raise NoSuchSnapshot(fault, remedy="Write context.snapshot, or name it in [snapshots].")
        return found

    @property
    def adapters(self) -> Adapters:
        """The small snapshots of the table `[adapters]`, by name, which are fetched when they are first opened.

        Raises NoSuchSnapshot if the settings have no snapshot.
        """
        return self._all_snapshots(
            'Set `[adapters]` with `NAME = "path/to/weights"` in pilotflame.toml.'
        ).adapters

    def _all_snapshots(self, remedy: str) -> Snapshots:
        found = self._snapshots
        if found is None and self.items:
            found = self.items[0]._snapshots  # noqa: SLF001  those of the same worker
        if found is None:
            fault = f"Function {self.function!r} has no snapshot, but its handler asked for one."
            raise NoSuchSnapshot(fault, remedy=remedy)
        return found
