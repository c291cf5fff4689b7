"""Run random histories of a simulated node, and say which of them break a property.

    python infra/bench/soak_histories.py --count 10000 --seed 0 --processes 2

The real reconciler runs in simulated time, with simulated processes (tests/histories.py). The exit code is 1 if a history fails.
One history is printed with `python tests/histories.py SEED`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from histories import HistoryFailed, run_history

# The progress is printed this often, in histories.
PROGRESS = 500


def run_some(first: int, count: int, step: int) -> None:
    """Run every `step`-th history, and print a line of JSON for each of them."""
    for seed in range(first, first + count, step):
        row: dict[str, object] = {"seed": seed}
        try:
            row |= run_history(seed)._asdict()
        except HistoryFailed as failed:
            row["failed"] = str(failed)
        print(json.dumps(row), flush=True)


async def soak(first: int, count: int, processes: int) -> int:
    """Run the histories in several processes, print what they tell, and return how many have failed."""
    began_s, ended, failed = time.perf_counter(), 0, list[int]()
    most = {"actions": 0.0, "steps_to_rest": 0.0, "most_runs": 0.0, "longest_wait_s": 0.0}

    async def read(number: int) -> None:
        nonlocal ended
        share = [str(first + number), str(count - number), str(processes)]
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--share", *share, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        assert child.stdout is not None
        async for line in child.stdout:
            row, ended = json.loads(line), ended + 1
            if "failed" in row:
                failed.append(row["seed"])
                print(row["failed"], flush=True)
            else:
                most.update({key: max(value, row[key]) for key, value in most.items()})
            if not ended % PROGRESS:
                print(f"{ended} histories, {len(failed)} failed", flush=True)
        if await child.wait():
            raise SystemExit(f"a process has ended with {child.returncode}")

    await asyncio.gather(*(read(number) for number in range(processes)))
    took_s = time.perf_counter() - began_s
    figures = ", ".join(f"{key} {value:.6g}" for key, value in most.items())
    print(f"{ended} histories in {took_s:.0f} s, at most: {figures}; failed: {sorted(failed) or 'none'}")
    return len(failed) + (ended != count)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="histories to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--share", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        run_some(*options.share)
        return 0
    return min(1, asyncio.run(soak(options.seed, options.count, options.processes)))


if __name__ == "__main__":
    sys.exit(main())
