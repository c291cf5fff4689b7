"""BentoML with a handler of `make bench-warm`: settings as JSON in BENCH_WARM. `POST /answer`.

    BENCH_WARM='{...}' bentoml serve bento_app:Answers --host 127.0.0.1 --port N

A batchable API takes a list and answers with one; callers send lists of one.
"""

from __future__ import annotations

import json
import os
from typing import Any

import bentoml
import work

GIVEN = json.loads(os.environ["BENCH_WARM"])


@bentoml.service(
    workers=GIVEN["workers"],
    threads=1,
    traffic={"timeout": 120},
    logging={"access": {"enabled": False}},
    metrics={"enabled": False},
)
class Answers:
    """One handler behind BentoML's adaptive batching."""

    def __init__(self) -> None:
        self._work = work.load(GIVEN["handler"], GIVEN["model"], GIVEN["threads"])

    @bentoml.api(batchable=True, max_batch_size=GIVEN["batch"], max_latency_ms=GIVEN["wait_ms"])  # type: ignore[untyped-decorator]
    def answer(self, events: list[dict[str, Any]]) -> list[Any]:
        found: list[Any] = self._work(events)
        return found
