"""Run random histories of a simulated node, and report which of them break a property of the reconciler.

    python infra/bench/soak_histories.py --count 10000 --seed 0 --processes 2

The real reconciler runs in simulated time, with simulated processes (tests/histories.py). One history is printed with
`python tests/histories.py SEED`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from report import Report, parser

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from histories import HistoryFailed, run_history

# The progress is printed each time that this number of histories has ended.
PROGRESS = 500


def failure(seed: int) -> str:
    """Run one history. Return the property that it breaks, or an empty text."""
    try:
        run_history(seed)
    except HistoryFailed as failed:
        return f"seed {seed}: {failed}"
    return ""


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=10_000, help="histories to run")
    options.add_argument("--seed", type=int, default=0, help="the first seed")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = options.parse_args()
    report, failed = Report("soak-histories"), list[str]()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for ended, text in enumerate(pool.imap_unordered(failure, seeds, 8), 1):
            failed += [text] if text else []
            if ended % PROGRESS == 0:
                print(f"{ended} histories, {len(failed)} failed", file=sys.stderr, flush=True)
    report.add("failed_histories", len(failed), f"of {arguments.count}", "== 0")
    for text in failed[:20]:
        report.note(text)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
