"""Keeps the history of each function, which the function's revisions share, and stores it in documents below `habits/`.

Each function has one document. `node.json` has the node-wide prior of idle times. A document that is missing or damaged counts
as empty: the policy then starts without history.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ....errors import GatewayError
from ...ground.billing.account import Account
from ...ground.settings.function_settings import FunctionName
from ...ground.storing.documents import Documents
from ...ground.telemetry.rung_name import RungName
from ..scaling.idle_distribution import PRIOR_BINS, Prior, SharedPrior
from ..scaling.keep_alive import CANDIDATES, IDLES, INTERVALS, History
from ..scaling.ladder import BurstWait
from ..scaling.rung_figures import RungFigures
from ..scaling.slow_share import MOST_DOUBLINGS, SlowShare
from ..scaling.upstream import BOUNDS_S, MOST_UPSTREAMS, Delays
from .function import Function

# The delay between the first change and the write of all changes. If a crash loses changes, no harm is done.
WRITE_AFTER_S = 60.0
NODE_DOCUMENT = "habits/node.json"
_StoredT = TypeVar("_StoredT", bound=BaseModel)
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Idling(BaseModel, frozen=True):
    """The idle period that was under way when the document was written."""

    since_at: float
    """When the last request ended, in Unix seconds."""
    since_wake_s: _Amount


class _Delays(BaseModel, frozen=True):
    """The delays of the function's calls after calls of an upstream function, as stored."""

    calls: _Amount
    hits: tuple[_Amount, ...] = Field(min_length=len(BOUNDS_S), max_length=len(BOUNDS_S))


class _SlowShare(BaseModel, frozen=True):
    """The `SlowShare` of the function, as stored."""

    doublings: float = Field(0.0, ge=-MOST_DOUBLINGS, le=MOST_DOUBLINGS)
    burst: float = Field(1.0, ge=1, allow_inf_nan=False)
    recent_slow: _Amount = 0.0
    recent: _Amount = 0.0


class _Remembered(BaseModel, frozen=True):
    """The content of a function's document."""

    idles: tuple[_Amount, ...] = Field((), max_length=IDLES)
    intervals: tuple[_Amount, ...] = Field((), max_length=INTERVALS)
    burst_waits: tuple[tuple[_Amount, Annotated[int, Field(ge=0)]], ...] = Field((), max_length=len(RungName))
    periods: int = Field(0, ge=0)
    bills: tuple[_Amount, ...] = Field((0.0,) * CANDIDATES, min_length=CANDIDATES, max_length=CANDIDATES)
    lasting_bills: tuple[_Amount, ...] | None = Field(None, min_length=CANDIDATES, max_length=CANDIDATES)
    held_bytes: dict[RungName, _Amount] = {}
    wakes_s: dict[RungName, tuple[_Amount, ...]] = {}
    build_s: _Amount = 0.0
    devices: _Amount = 0.0
    idling: _Idling | None = None
    slow_share: _SlowShare = _SlowShare()
    upstreams: dict[FunctionName, _Delays] = Field({}, max_length=MOST_UPSTREAMS)


class _RememberedNode(BaseModel, frozen=True):
    weights: tuple[_Amount, ...] = Field((0.0,) * PRIOR_BINS, min_length=PRIOR_BINS, max_length=PRIOR_BINS)


class FunctionHistories:
    """The histories of all functions, in memory and in documents.

    Changes are stored at most once a minute, and in `close`.
    """

    def __init__(
        self,
        documents: Documents,
        tasks: asyncio.TaskGroup,
        shared: SharedPrior,
        accounts: Callable[[str], Account],
    ) -> None:
        """`accounts` returns the account of a function."""
        self._documents, self._tasks, self._shared, self._accounts = documents, tasks, shared, accounts
        self._histories: dict[str, Function] = {}
        self._changed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._writing = asyncio.Lock()

    @classmethod
    async def open(
        cls, documents: Documents, tasks: asyncio.TaskGroup, accounts: Callable[[str], Account]
    ) -> FunctionHistories:
        """Return the stored histories."""
        node = await asyncio.to_thread(_read, documents, NODE_DOCUMENT, _RememberedNode)
        shared = SharedPrior(Prior(node.weights))
        return cls(documents, tasks, shared, accounts)

    async def of(self, name: str) -> Function:
        """Return a function from memory, or else with its stored history. The caller holds the function's lock."""
        if (known := self._histories.get(name)) is not None:
            return known
        stored = await asyncio.to_thread(_read, self._documents, _document(name), _Remembered)
        history = Function.new(name, self._accounts(name), self._shared, lambda: self._note_change(name))
        _restore(history, stored)
        self._histories[name] = history
        return history

    async def forget(self, name: str) -> None:
        """Forget a function that was deleted, or whose first deploy has failed."""
        self._histories.pop(name, None)
        self._changed.discard(name)
        async with self._writing:
            await asyncio.to_thread(self._documents.remove, _document(name))

    async def close(self) -> None:
        """Write the histories of all functions."""
        if self._timer is not None:
            self._timer.cancel()
        self._changed |= self._histories.keys()
        await self._write()

    def _note_change(self, name: str) -> None:
        if name not in self._histories:
            return
        self._changed.add(name)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(WRITE_AFTER_S, self._start_writing)

    def _start_writing(self) -> None:
        self._timer = None
        self._tasks.create_task(self._write(), name="function histories")

    async def _write(self) -> None:
        async with self._writing:
            changed, self._changed = self._changed, set()
            known = {name: one for name in changed if (one := self._histories.get(name)) is not None}
            due = list[tuple[str, Callable[[], BaseModel]]]()
            for name, history in known.items():
                due.append((_document(name), _remembering(history)))
                # A thousand functions may have changed: let the event loop serve requests in between.
                await asyncio.sleep(0)
            if due:
                node = _RememberedNode(weights=self._shared.prior.weights)
                await asyncio.to_thread(_write, self._documents, [(NODE_DOCUMENT, lambda: node), *due])


def _remembering(known: Function) -> Callable[[], _Remembered]:
    """Copy the present state, and return a function that makes the content of the document from the copy.

    The returned function can run in a thread.
    """
    ladder = known.ladder
    delays = {name: (one.calls, tuple(one.hits)) for name, one in known.upstreams.items()}
    learning, figures = ladder.past.learning(ladder.measured.ladder), ladder.measured.figures
    slow_share = _SlowShare.model_validate(asdict(ladder.measured.slow_share))
    period, clock_at = ladder.watch.period, time.time() - time.monotonic()
    idling = _Idling(since_at=clock_at + period.begun_s, since_wake_s=period.since_s) if period else None

    def remembered() -> _Remembered:
        history = learning.history()
        upstreams = {name: _Delays(calls=calls, hits=hits) for name, (calls, hits) in delays.items()}
        return _Remembered(
            idles=_rounded(history.idles), intervals=_rounded(history.intervals), burst_waits=history.waits, periods=history.periods,
            bills=history.bills, lasting_bills=history.lasting_bills, held_bytes=dict(figures.held_bytes), wakes_s=dict(figures.wakes_s),
            build_s=figures.build_s, devices=figures.devices, idling=idling,
            upstreams=upstreams, slow_share=slow_share,
        )  # fmt: skip

    return remembered


def _rounded(times_s: Iterable[float]) -> tuple[float, ...]:
    """Round times to milliseconds, which halves their space in a document."""
    return tuple(round(time_s, 3) for time_s in times_s)


def _restore(known: Function, stored: _Remembered) -> None:
    ladder = known.ladder
    known.upstreams.update(
        (name, Delays(one.calls, list(one.hits))) for name, one in stored.upstreams.items()
    )
    lasting_bills = stored.lasting_bills or stored.bills
    waits = tuple(BurstWait(*pair) for pair in stored.burst_waits)
    ladder.past.history = History(
        stored.idles, stored.intervals, waits, stored.periods, stored.bills, lasting_bills
    )
    ladder.measured.figures = RungFigures(stored.held_bytes, stored.wakes_s, stored.build_s, stored.devices)
    ladder.measured.slow_share = SlowShare(**dict(stored.slow_share))
    if stored.idling is not None:
        # The previous gateway ended during this period, so nothing is learned from its length.
        idle_s = max(0.0, time.time() - stored.idling.since_at)
        ladder.watch.resume(time.monotonic() - idle_s, stored.idling.since_wake_s)


def _document(function: str) -> str:
    """Return the name of the document with a function's history."""
    return f"habits/functions/{function}.json"


def _read(documents: Documents, name: str, model: type[_StoredT]) -> _StoredT:
    with contextlib.suppress(GatewayError, ValidationError):
        if (data := documents.get(name)) is not None:
            return model.model_validate_json(data)
    return model()


def _write(documents: Documents, due: list[tuple[str, Callable[[], BaseModel]]]) -> None:
    """Store the histories. If a write fails, that history stays in memory only."""
    for name, remembered in due:
        with contextlib.suppress(GatewayError):
            documents.put(name, remembered().model_dump_json().encode(), durable=False)
