"""Checks what gateways with one database have accepted and done: what must hold in each such history."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Order(NamedTuple):
    """An accepted input: of a job, or of a message in a queue."""

    source: str
    """`job`, or the kind of the queue."""
    key: str
    """The messages of a key run in the order of their numbers. "" for jobs, which have no order."""
    number: int


@dataclass
class SharedHistory:
    """A history of one function."""

    orders: set[Order] = field(default_factory=set)
    jobs: dict[int, str] = field(default_factory=dict)
    """The ids of submitted jobs, by the numbers of their orders."""
    runs: list[Order] = field(default_factory=list)
    """The runs of the handler, in the order of their ends. A job may run again if a gateway has died."""
    results: dict[str, Any] = field(default_factory=dict)
    """The outputs of the jobs that have completed, by their ids."""
    webhooks: list[tuple[str, str]] = field(default_factory=list)
    """The job and the id of each webhook that has arrived. A webhook may arrive again, under the same id."""
    completed: int = 0
    """How many jobs have completed, as the gateways have counted them."""

    def faults(self) -> list[str]:
        """Return a text for each broken property."""
        return [*self._lost(), *self._twice(), *self._out_of_order()]

    def _lost(self) -> Iterable[str]:
        yield from (f"{order} has never run" for order in sorted(self.orders - {*self.runs}))
        told = {job for job, _ in self.webhooks}
        for number, job in self.jobs.items():
            if job not in self.results:
                yield f"the result of job {number} is lost"
            elif self.results[job] != number:
                yield f"job {number} has the result {self.results[job]}"
            if job not in told:
                yield f"the webhook of job {number} never came"

    def _twice(self) -> Iterable[str]:
        if len({*self.jobs.values()}) < len(self.jobs):
            yield "two keys have one job"
        if self.completed != len(self.orders):
            yield f"{len(self.orders)} orders were accepted, and {self.completed} have completed"
        for job, count in Counter(job for job, _ in {*self.webhooks}).items():
            if count > 1:
                yield f"the job {job} has {count} webhooks"

    def _out_of_order(self) -> Iterable[str]:
        by_key: dict[tuple[str, str], list[int]] = {}
        for source, key, number in dict.fromkeys(self.runs):
            if key:
                by_key.setdefault((source, key), []).append(number)
        for (source, key), numbers in by_key.items():
            if numbers != sorted(numbers):
                yield f"the messages of {key} of {source} ran as {numbers}"


def read_runs(path: Path) -> list[Order]:
    """Return the runs that handlers have written to a file, one in each line."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [order_of(json.loads(line)) for line in lines]


def order_of(event: Mapping[str, Any]) -> Order:
    return Order(event["source"], event["key"], event["number"])
