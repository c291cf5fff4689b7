"""The floor of `make bench-warm`: the handler's work alone in a loop, without a server, in one process per worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from lane import Lane
from pilotflame.runtime.commands import minilm
from warm_peers import APPS, BODIES, Choice


class BareWork:
    """A lane's contestant: batches of one size, one after the other."""

    def __init__(self, handler: str, model: str, threads: int) -> None:
        import sys  # noqa: PLC0415

        sys.path.insert(0, str(APPS))
        import work  # noqa: PLC0415

        self._work = work.load(handler, model, threads)
        self._event = BODIES[handler]

    def run(self, batch: int, for_s: float) -> dict[str, Any]:
        events = [self._event] * batch
        self._work(events)
        started_s, times = time.perf_counter(), 0
        while time.perf_counter() - started_s < for_s:
            self._work(events)
            times += 1
        return {"seconds": time.perf_counter() - started_s, "items": times * batch}

    def check(self) -> None:
        """The answers are compared elsewhere: it is the same code."""

    def clear(self) -> None:
        """Nothing is kept."""


class Bare:
    """One process for each worker of our function, with the same number of threads."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes

    def per_second(self, batch: int, for_s: float = 1.5, workers: int | None = None) -> float:
        """Return the total rate of the first `workers` processes, by default of all processes."""
        lanes = self._lanes[:workers]
        with ThreadPoolExecutor(len(lanes)) as threads:
            told = threads.map(lambda lane: lane.turn(batch=batch, for_s=for_s), lanes)
            return sum(float(turn["items"] / turn["seconds"]) for turn in told)


@contextmanager
def bare(handler: str, choice: Choice) -> Iterator[Bare]:
    """The work of a handler, without a server, in the same number of processes and threads as a choice has."""
    given: dict[str, Any] = {
        "handler": handler,
        "model": str(minilm.model_folder()),
        "threads": choice.threads,
    }
    with ExitStack() as stack:
        lanes = [
            stack.enter_context(
                Lane(f"bare {number}", "warm_bare:BareWork", env=dict(minilm.OFFLINE), **given)
            )
            for number in range(choice.workers)
        ]
        for lane in lanes:
            lane.wait_ready()
        yield Bare(lanes)
