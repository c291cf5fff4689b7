"""Hostile functions and callers, each against a gateway of its own with two other tenants under light load.

    python infra/bench/attack.py [--only NAME ...] [--seconds 4] [--jobs 99000] [--json]

An attack is contained if it gets nothing, if the others have no error, no lost job, no call longer than a second, and a p99
of at most three times the quiet one or 50 ms more, and if the memory and the descriptors of the gateway stay within limits.
If only calls were too slow, the attack is repeated once, because other work on the machine may be the cause.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import attacks  # noqa: F401  it fills ATTACKS
import stranger_attacks  # noqa: F401  it fills ATTACKS
from attack_stage import ATTACKS, Attack, Breach, Stage
from containers import made_image, require_podman, running_engine
from hostile import callers
from load import Request, Tally, load_apart
from percentiles import percentile
from report import Report, parser
from rich.console import Console
from rich.table import Table

PATHS = {"alpha": ("/invoke/hello", 40.0), "beta": ("/v2/render/runsync", 10.0)}
"""The path and the requests per second of each tenant."""
MOST = {
    "MB of memory": 512,
    "descriptors": 1000,
    "MB of memory afterwards": 100,
    "descriptors afterwards": 32,
}
"""How much the gateway may grow."""
LONGEST_MS = 1000.0
LOST_S, SETTLE_S = 30.0, 12.0
SLOW = "slow:"


def load(stage: Stage, seconds: float) -> dict[str, Tally]:
    """Return the tallies of the two tenants, who send at the same time."""

    def send(tenant: str) -> Tally:
        path, rate = PATHS[tenant]
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {stage.keys[tenant]}"}
        request = Request(stage.server.url + path, b'{"input": {"n": 1}}', headers, capture="X-Request-Id")
        return load_apart(request, rate=rate, duration_s=seconds)

    with ThreadPoolExecutor(len(PATHS)) as pool:
        return dict(zip(PATHS, pool.map(send, PATHS), strict=True))


def run(attack: Attack, engine: str, options: argparse.Namespace) -> Stage:
    """Run an attack on a new gateway, and return what was measured."""
    with tempfile.TemporaryDirectory(prefix="pf-attack-", dir="/tmp") as folder:
        stage = Stage(Path(folder), engine, made_image(), options.seconds, options.jobs, attack)
        try:
            stage.start()
            stage.set_up()
            load(stage, 0.5)
            measure(stage)
        finally:
            stage.stop()
    return stage


def measure(stage: Stage) -> None:
    quiet, before, parts = load(stage, stage.seconds), stage.held(), list[dict[str, Tally]]()
    with callers.senders(2) as pool:
        pool.submit(stage.watch)
        try:
            stage.attack.prepare(stage)
            stage.until_s = time.monotonic() + stage.seconds
            acting = pool.submit(stage.attack.act, stage)
            while not parts or not acting.done():
                parts.append(load(stage, stage.seconds))
        finally:
            stage.over = True
    try:
        stage.text = acting.result()
    except Breach as breach:
        stage.faults.append(str(breach))
    for tenant in PATHS:
        check_load(stage, tenant, quiet[tenant], [part[tenant] for part in parts])
    accepted = {job for part in (quiet, *parts) for job in part["beta"].captured if job}
    if lost := stage.lost(accepted, LOST_S):
        stage.faults.append(f"{len(lost)} of {len(accepted)} accepted jobs are lost")
    check_gateway(stage, before)


def check_load(stage: Stage, tenant: str, quiet: Tally, parts: list[Tally]) -> None:
    for one in (quiet, *parts):
        if not one.clean:
            stage.faults.append(f"{tenant}: {dict(one.statuses)} {dict(one.errors)} {one.wrong_sample}")
    alone_ms = quiet.p_ms(0.99)
    beside_ms = percentile([latency for part in parts for latency in part.latencies_ns], 0.99) / 1e6
    most_ms = max(3 * alone_ms, alone_ms + 50)
    longest_ms = max(latency for part in parts for latency in (part.latencies_ns or [0])) / 1e6
    stage.cells.append(f"{alone_ms:.0f} → {beside_ms:.0f} ({most_ms:.0f}), {longest_ms:.0f}")
    if beside_ms > most_ms:
        stage.faults.append(f"{SLOW} p99 of {tenant} is {beside_ms:.0f} ms, allowed {most_ms:.0f} ms")
    if longest_ms > LONGEST_MS:
        stage.faults.append(
            f"{SLOW} the longest call of {tenant} takes {longest_ms:.0f} ms, allowed {LONGEST_MS:.0f} ms"
        )


def check_gateway(stage: Stage, before: tuple[float, int]) -> None:
    peak_mb, peak = (max(values) for values in zip(*stage.seen, strict=True))
    until_s = time.monotonic() + SETTLE_S
    while not settled(before, after := stage.held()) and time.monotonic() < until_s:
        time.sleep(0.1)
    stage.cells.append(f"{before[0]:.0f} → {peak_mb:.0f} → {after[0]:.0f}")
    stage.cells.append(f"{before[1]} → {peak} → {after[1]}")
    grown = (peak_mb - before[0], peak - before[1], after[0] - before[0], after[1] - before[1])
    for (what, most), growth in zip(MOST.items(), grown, strict=True):
        if growth > most:
            stage.faults.append(f"the gateway grew by {growth:.0f} {what}, allowed {most}")


def settled(before: tuple[float, int], after: tuple[float, int]) -> bool:
    return after[1] <= before[1] and after[0] <= before[0] + MOST["MB of memory afterwards"]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options.add_argument(
        "--jobs", type=int, default=99_000, help="that are queued before another tenant's one"
    )
    arguments = options.parse_args()
    require_podman()
    report, table = Report("attack", packages=("aiodocker",)), Table()
    for column in ("attack", "result", "calls, ms", "jobs, ms", "gateway, MB", "descriptors", ""):
        table.add_column(column)
    contained = 0
    with tempfile.TemporaryDirectory(prefix="pf-engine-") as folder, running_engine(Path(folder)) as engine:
        for name in arguments.only:
            attack = ATTACKS[name]
            with report.part(f"{name}: {attack.tries}"):
                found = run(attack, engine.url, arguments)
                if found.faults and all(fault.startswith(SLOW) for fault in found.faults):
                    found = run(attack, engine.url, arguments)
                contained += not found.faults
                result = "NOT CONTAINED" if found.faults else "contained"
                text = "; ".join(filter(None, [*found.faults, found.text]))
                report.row(attack=name, tries=attack.tries, result=result, text=text, cells=found.cells)
                table.add_row(name, result, *found.cells, text)
    report.add("attacks_contained", contained, f"of {len(arguments.only)}", f">= {len(arguments.only)}")
    report.note(
        "calls and jobs: p99 quiet → meanwhile (allowed), longest; memory and descriptors: before → most → afterwards"
    )
    Console(width=180, stderr=arguments.json).print(table)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
