"""Callers who submit jobs, some twice, and ask for their status again and again while the gateway is killed.

They record the id that each caller got, and the first final state seen of each job.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from killable_gateway import KillableGateway

FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT"})
ANSWER_S = 30.0
MAX_OPEN = 120
PIECES = 3
KEYED, TWICE, AGAIN, HOOKED = 0.7, 0.3, 0.15, 0.5
"""Probabilities: that a new job has a key, that such a job is sent twice at once, that an old job is repeated, that a job has a webhook."""


@dataclass(slots=True)
class AcceptedJob:
    """A job that was accepted."""

    id: str
    function: str
    number: int
    key: str
    hooked: bool
    order: Mapping[str, Any]
    status: str = ""
    result: str = ""
    """The final state as it was first seen."""
    error: Mapping[str, Any] = field(default_factory=dict)


class JobCallers:
    """`wrong` describes each answer that contradicts an earlier one."""

    def __init__(
        self, gateway: KillableGateway, functions: Mapping[str, str], hook: str, chance: random.Random
    ) -> None:
        self.jobs: dict[str, AcceptedJob] = {}
        self.wrong: list[str] = []
        self.unanswered = 0
        """Submissions without a key that got no answer. Their jobs may exist or not."""
        self._gateway = gateway
        self._functions = functions
        self._hook = hook
        self._chance = chance
        self._numbers = itertools.count(1)
        self._open: dict[str, AcceptedJob] = {}
        self._keyed: list[AcceptedJob] = []
        self._final: list[AcceptedJob] = []

    async def submit(self, stop: asyncio.Event, pause_s: float) -> None:
        """Submit jobs as one caller, until `stop`."""
        async with self._session() as session:
            while not stop.is_set():
                if len(self._open) >= MAX_OPEN:
                    await asyncio.sleep(pause_s)
                elif self._keyed and self._chance.random() < AGAIN:
                    await self._repeat(session, self._chance.choice(self._keyed))
                else:
                    await self._new(session)
                await asyncio.sleep(self._chance.uniform(0, pause_s))

    async def watch(self, stop: asyncio.Event) -> None:
        """Check until `stop` whether open jobs end, and whether ended jobs stay as they were."""
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
                for job in list(self._open.values()):
                    await self.look(session, job)
                await asyncio.sleep(0.05)
            left = set(functions)
            while left:
                left = {function for function in left if await self._busy(session, function)}
                await asyncio.sleep(0.05)

    async def _busy(self, session: aiohttp.ClientSession, function: str) -> bool:
        _, health = await self._ask(session, "GET", f"/v2/{function}/health")
        return bool(health["jobs"]["inQueue"] or health["jobs"]["inProgress"])

    async def look(self, session: aiohttp.ClientSession, job: AcceptedJob) -> None:
        """Ask for the status of a job. A final state must stay as it was first seen."""
        status, seen = await self._ask(session, "GET", f"/v2/{job.function}/status/{job.id}")
        if status != 200:
            self._report(f"{job.id} was accepted, and now: {status} {seen}")
        elif seen["status"] in FINAL:
            await self._end(job, seen)
        elif job.result:
            self._report(f"{job.id} had ended as {job.result}, and is {seen['status']}")

    async def look_at_all(self) -> None:
        """Ask for the status of each job once more."""
        async with self._session() as session:
            for job in self.jobs.values():
                await self.look(session, job)

    def right(self, job: AcceptedJob) -> bool:
        """Return True if a completed job has the right output."""
        return job.result == _result(_wanted(self._functions[job.function], job.number))

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
        if len(set(ids)) > 1:
            self._report(f"{key} sent twice at once gave {ids}")
        if ids[0]:
            job = AcceptedJob(ids[0], function, number, key, hooked, order)
            self.jobs[job.id] = self._open[job.id] = job
            if key:
                self._keyed.append(job)

    async def _repeat(self, session: aiohttp.ClientSession, old: AcceptedJob) -> None:
        found = await self._run(session, old.function, old.order, old.key)
        if found != old.id:
            self._report(f"{old.key} gave {old.id} at first, then {found}")

    async def _run(self, session: aiohttp.ClientSession, function: str, order: Any, key: str) -> str:
        """Return the id of the job. Return "" if no answer came and the submission cannot be repeated, since
        it has no key.
        """
        headers = {"Idempotency-Key": key} if key else {}
        status, answer = await self._ask(
            session, "POST", f"/v2/{function}/run", order, headers, again=bool(key)
        )
        if not status:
            self.unanswered += 1
            return ""
        if status != 200:
            self._report(f"submitting to {function}: {status} {answer}")
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
    ) -> tuple[int, Any]:
        """Return status and answer. With `again`, repeat until there is an answer. Without one, the status is 0."""
        while True:
            await self._gateway.up.wait()
            try:
                async with session.request(
                    method, self._gateway.url + path, json=body, headers=headers
                ) as found:
                    return found.status, json.loads(await found.read())
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                if not again:
                    return 0, None
            # Pause before the next attempt: `up` may still be set for a moment after the gateway has ended.
            await asyncio.sleep(0.01)

    async def _end(self, job: AcceptedJob, seen: Mapping[str, Any]) -> None:
        result = _result([seen["status"], seen.get("output")])
        if not job.result:
            job.status, job.result = seen["status"], result
            job.error = seen.get("errorDetails", {})
            self._final.append(job)
            del self._open[job.id]
        elif result != job.result:
            self._report(f"{job.id} came to {job.result}, then to {result}")

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))

    def _report(self, text: str) -> None:
        self.wrong.append(text)


def _wanted(kind: str, number: int) -> list[Any]:
    pieces = [{"number": number, "piece": piece} for piece in range(PIECES)]
    return ["COMPLETED", pieces if kind == "pieces" else {"number": number, "square": number * number}]


def _result(seen: Any) -> str:
    return json.dumps(seen, sort_keys=True)
