"""A crowd of callers who submit jobs, some twice, and look at them again and again, whatever happens to the gateway.

It records each promise: the id that each caller got, and the first final state seen of each job.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from mortal import Mortal

FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT"})
ANSWER_S = 30.0
MAX_OPEN = 120
PIECES = 3
KEYED, TWICE, AGAIN, HOOKED = 0.7, 0.3, 0.15, 0.5
"""Shares: of jobs with a key; of these, sent twice at once; of calls that repeat an old key; of jobs with a webhook."""


@dataclass(slots=True)
class Promise:
    """A job that was accepted."""

    id: str
    function: str
    number: int
    key: str
    hooked: bool
    order: Mapping[str, Any]
    status: str = ""
    result: str = ""
    """As it was first seen once it was final."""
    error: Mapping[str, Any] = field(default_factory=dict)


class Crowd:
    """`wrong` are the promises that were broken, in words."""

    def __init__(
        self, gateway: Mortal, functions: Mapping[str, str], hook: str, chance: random.Random
    ) -> None:
        self.promises: dict[str, Promise] = {}
        self.wrong: list[str] = []
        self.counts = Counter[str]()
        self._gateway = gateway
        self._functions = functions
        self._hook = hook
        self._chance = chance
        self._numbers = itertools.count(1)
        self._open: dict[str, Promise] = {}
        self._keyed: list[Promise] = []
        self._final: list[Promise] = []
        self._moved = asyncio.Condition()

    async def submit(self, stop: asyncio.Event, pause_s: float) -> None:
        """One caller, until `stop`."""
        async with self._session() as session:
            while not stop.is_set():
                async with self._moved:
                    await self._moved.wait_for(lambda: len(self._open) < MAX_OPEN or stop.is_set())
                if self._keyed and self._chance.random() < AGAIN:
                    await self._repeat(session, self._chance.choice(self._keyed))
                else:
                    await self._new(session)
                await asyncio.sleep(self._chance.uniform(0, pause_s))

    async def watch(self, stop: asyncio.Event) -> None:
        """One observer: check whether open jobs end, and whether some of the ended jobs stay as they were."""
        async with self._session() as session:
            while not stop.is_set():
                of = list(self._open.values())
                if self._final and (not of or self._chance.random() < AGAIN):
                    of = self._final
                if of:
                    await self.look(session, self._chance.choice(of))
                await asyncio.sleep(0.01)

    async def see_out(self, functions: Iterable[str]) -> None:
        """Wait until all jobs of these functions have ended, including jobs whose submission got no answer."""
        async with self._session() as session:
            while self._open:
                for promise in list(self._open.values()):
                    await self.look(session, promise)
                await asyncio.sleep(0.05)
            left = set(functions)
            while left:
                left = {function for function in left if await self._busy(session, function)}
                await asyncio.sleep(0.05)

    async def _busy(self, session: aiohttp.ClientSession, function: str) -> bool:
        _, _, health = await self._ask(session, "GET", f"/v2/{function}/health")
        return bool(health["jobs"]["inQueue"] or health["jobs"]["inProgress"])

    async def look(self, session: aiohttp.ClientSession, promise: Promise) -> None:
        """A job as it is now; final, it must stay as it was first seen."""
        status, _, seen = await self._ask(session, "GET", f"/v2/{promise.function}/status/{promise.id}")
        if status != 200:
            self._tell(f"{promise.id} was accepted, and now: {status} {seen}")
        elif seen["status"] in FINAL:
            await self._end(promise, seen)
        elif promise.result:
            self._tell(f"{promise.id} had ended as {promise.result}, and is {seen['status']}")

    async def look_at_all(self) -> None:
        """At each job once more."""
        async with self._session() as session:
            for promise in self.promises.values():
                await self.look(session, promise)

    def right(self, promise: Promise) -> bool:
        """Whether a completed job has the right output."""
        return promise.result == _result(_wanted(self._functions[promise.function], promise.number))

    async def wake(self) -> None:
        """Wake the callers that wait for room, so that they check whether to stop."""
        async with self._moved:
            self._moved.notify_all()

    # -- how it is done

    async def _new(self, session: aiohttp.ClientSession) -> None:
        number, names = next(self._numbers), list(self._functions)
        (function,) = self._chance.choices(
            names, [1 if self._functions[name] == "slow" else 5 for name in names]
        )
        key = f"key-{number}" if self._chance.random() < KEYED else ""
        order: dict[str, Any] = {"input": {"number": number}}
        if hooked := self._chance.random() < HOOKED:
            order["webhook"] = self._hook
            order["webhook_events"] = self._chance.choice([["completed"], ["start", "completed"]])
        times = 2 if key and self._chance.random() < TWICE else 1
        ids = await asyncio.gather(*(self._run(session, function, order, key) for _ in range(times)))
        self.counts["twice"] += times - 1
        if len(set(ids)) > 1:
            self._tell(f"{key} sent twice at once gave {ids}")
        if ids[0]:
            promise = Promise(ids[0], function, number, key, hooked, order)
            self.promises[promise.id] = self._open[promise.id] = promise
            if key:
                self._keyed.append(promise)

    async def _repeat(self, session: aiohttp.ClientSession, old: Promise) -> None:
        self.counts["again"] += 1
        found = await self._run(session, old.function, old.order, old.key)
        if found != old.id:
            self._tell(f"{old.key} gave {old.id} at first, then {found}")

    async def _run(self, session: aiohttp.ClientSession, function: str, order: Any, key: str) -> str:
        """The id; "" if no answer came, and it had no key with which it could be sent again."""
        headers = {"Idempotency-Key": key} if key else {}
        self.counts["sent"] += 1
        status, sent, answer = await self._ask(
            session, "POST", f"/v2/{function}/run", order, headers, again=bool(key)
        )
        self.counts["resent"] += sent - 1
        if not status:
            self.counts["unanswered"] += 1
            return ""
        if status != 200:
            self._tell(f"submitting to {function}: {status} {answer}")
            return ""
        return str(answer["id"])

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        again: bool = True,
    ) -> tuple[int, int, Any]:
        """Return (status, number of attempts, answer). With `again`, repeat until there is an answer. Without one, status is 0."""
        sent = 0
        while True:
            await self._gateway.up.wait()
            sent += 1
            try:
                async with session.request(
                    method, self._gateway.url + path, json=body, headers=headers
                ) as found:
                    return found.status, sent, json.loads(await found.read())
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                if not again:
                    return 0, sent, None
            await asyncio.sleep(0.01)  # its end may be known here before `up` says so

    async def _end(self, promise: Promise, seen: Mapping[str, Any]) -> None:
        result = _result([seen["status"], seen.get("output")])
        if not promise.result:
            promise.status, promise.result = seen["status"], result
            promise.error = seen.get("errorDetails", {})
            self._final.append(promise)
            del self._open[promise.id]
            await self.wake()
        elif result != promise.result:
            self._tell(f"{promise.id} came to {promise.result}, then to {result}")

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))

    def _tell(self, text: str) -> None:
        self.wrong.append(text)


def _wanted(kind: str, number: int) -> list[Any]:
    pieces = [{"number": number, "piece": piece} for piece in range(PIECES)]
    return ["COMPLETED", pieces if kind == "pieces" else {"number": number, "square": number * number}]


def _result(seen: Any) -> str:
    return json.dumps(seen, sort_keys=True)
