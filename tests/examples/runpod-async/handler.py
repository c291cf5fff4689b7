from __future__ import annotations

import asyncio
import dataclasses
import os

import runpod
from runpod import RunPodLogger

log = RunPodLogger()
MAX_CONCURRENCY = int(os.environ.get("MAX_CONCURRENCY", "4"))


@dataclasses.dataclass
class Result:
    total: int
    worker: int


async def async_handler(job):
    numbers = job["input"]["numbers"]
    log.info(f"Summing {len(numbers)} numbers", job["id"])
    await asyncio.sleep(0)
    return dataclasses.asdict(Result(sum(numbers), os.getpid()))


def adjust_concurrency(current_concurrency):
    return min(current_concurrency + 1, MAX_CONCURRENCY)


runpod.serverless.start({"handler": async_handler, "concurrency_modifier": adjust_concurrency})
