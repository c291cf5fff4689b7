"""Hostile functions and callers, each against a gateway of its own with two other tenants under light load.

    python infra/bench/attack.py [--only NAME ...] [--seconds 5] [--jobs 99000] [--json]

An attack is contained if it gets nothing, if the others have no error, no lost job and a p99 of at most three times the
quiet one or 50 ms more, and if the gateway's memory and descriptors stay within limits. Load that only exceeded its p99 is
measured a second time, because other work on the machine may be the cause.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import attacks  # noqa: F401  it fills ATTACKS
from attack_stage import ATTACKS, Attack, Breach, Stage
from containers import made_image, require_podman, running_engine
from load import Request, Tally, load_apart
from report import Report, parser
from rich.console import Console
from rich.table import Table

RATES = {"alpha": 40.0, "beta": 10.0}
PATHS = {"alpha": "/invoke/hello", "beta": "/v2/work/runsync"}
MOST_MB, MOST_DESCRIPTORS, LEFT_DESCRIPTORS = 512.0, 1000, 32
"""The growth of the gateway that is allowed: of its memory and its descriptors meanwhile, and of descriptors afterwards."""
LOST_S, SETTLE_S = 30.0, 12.0


def load(stage: Stage, seconds: float) -> dict[str, Tally]:
    """Return the tallies of the two tenants, who send at the same time."""

    def send(tenant: str) -> Tally:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {stage.keys[tenant]}"}
        url = stage.server.url + PATHS[tenant]
        request = Request(url, b'{"input": {"n": 1}}', headers, capture="X-Request-Id")
        return load_apart(request, rate=RATES[tenant], duration_s=seconds)

    with ThreadPoolExecutor(len(RATES)) as pool:
        return dict(zip(RATES, pool.map(send, RATES), strict=True))


def joined(tallies: Iterable[Tally]) -> Tally:
    whole = Tally()
    for one in tallies:
        whole.latencies_ns += one.latencies_ns
        whole.captured += one.captured
        whole.statuses += one.statuses
        whole.errors += one.errors
        whole.wrong_sample = whole.wrong_sample or one.wrong_sample
    return whole


@dataclass
class Outcome:
    """The result of one attack. It is contained if there is no fault."""

    text: str
    faults: list[str]
    cells: dict[str, Any]
    slow: int = 0
    """The number of faults that are a p99 of another tenant."""


def run(found: Attack, engine: str, image: str, seconds: float, jobs: int) -> Outcome:
    """Run an attack on a gateway of its own."""
    with tempfile.TemporaryDirectory(prefix="pf-attack-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        stage = Stage(Path(folder), engine, image, seconds, jobs, found)
        try:
            stage.start()
            stage.set_up()
            load(stage, 0.5)
            return measured(found, stage)
        finally:
            stage.stop()


def measured(found: Attack, stage: Stage) -> Outcome:
    quiet, before = load(stage, stage.seconds), stage.held()
    parts: list[dict[str, Tally]] = []
    with stage.peaks() as held, ThreadPoolExecutor(1) as pool:
        found.prepare(stage)
        stage.until_s = time.monotonic() + stage.seconds
        acting = pool.submit(found.act, stage)
        while not parts or not acting.done():
            parts.append(load(stage, stage.seconds))
    during = {tenant: joined(part[tenant] for part in parts) for tenant in RATES}
    outcome = Outcome("", [], {})
    try:
        outcome.text = acting.result()
    except Breach as breach:
        outcome.faults.append(str(breach))
    check_load(outcome, quiet, during)
    if lost := stage.lost({*quiet["beta"].captured, *during["beta"].captured}, LOST_S):
        outcome.faults.append(f"{len(lost)} accepted jobs of beta are lost")
    check_gateway(outcome, stage, before, held)
    return outcome


def check_load(outcome: Outcome, quiet: dict[str, Tally], during: dict[str, Tally]) -> None:
    for tenant, tally in during.items():
        for name, one in (("quiet", quiet[tenant]), ("meanwhile", tally)):
            if not one.clean:
                outcome.faults.append(
                    f"{tenant}, {name}: {dict(one.statuses)} {dict(one.errors)} {one.wrong_sample}"
                )
        alone, beside = quiet[tenant].p_ms(0.99), tally.p_ms(0.99)
        most = max(3 * alone, alone + 50)
        outcome.cells[tenant] = f"{tally.right} {alone:.0f} → {beside:.0f} ({most:.0f})"
        if beside > most:
            outcome.slow += 1
            outcome.faults.append(f"{tenant}: p99 {beside:.0f} ms, allowed {most:.0f} ms")


def check_gateway(
    outcome: Outcome, stage: Stage, before: tuple[float, int], held: list[tuple[float, int]]
) -> None:
    peak_mb, peak = (max(values) for values in zip(*held, strict=True))
    until_s = time.monotonic() + SETTLE_S
    while stage.held()[1] > before[1] + LEFT_DESCRIPTORS and time.monotonic() < until_s:
        time.sleep(0.1)
    after = stage.held()
    outcome.cells["MB"] = f"{before[0]:.0f} → {peak_mb:.0f} → {after[0]:.0f}"
    outcome.cells["descriptors"] = f"{before[1]} → {peak} → {after[1]}"
    for what, grown, most in (
        ("MB of memory", peak_mb - before[0], MOST_MB),
        ("descriptors", peak - before[1], MOST_DESCRIPTORS),
        ("descriptors that are left", after[1] - before[1], LEFT_DESCRIPTORS),
    ):
        if grown > most:
            outcome.faults.append(f"the gateway grew by {grown:.0f} {what}, allowed {most:.0f}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    options.add_argument(
        "--jobs", type=int, default=99_000, help="that are queued before another tenant's one"
    )
    arguments = options.parse_args()
    require_podman()
    report, table = Report("attack", packages=("aiodocker",)), Table(title="attacks")
    columns = (
        "attack",
        "result",
        "calls, p99 ms (most)",
        "jobs, p99 ms (most)",
        "gateway, MB",
        "descriptors",
        "",
    )
    for column in columns:
        table.add_column(column)
    contained = 0
    with (
        tempfile.TemporaryDirectory(prefix="pf-attack-", dir="/tmp") as folder,
        running_engine(Path(folder)) as engine,
    ):
        image = made_image()
        for name in arguments.only:
            with report.part(name):
                given = (ATTACKS[name], engine.url, image, arguments.seconds, arguments.jobs)
                outcome = run(*given)
                if outcome.slow and len(outcome.faults) == outcome.slow:
                    outcome = run(*given)
                result = "NOT CONTAINED" if outcome.faults else "contained"
                contained += not outcome.faults
                text = "; ".join([*outcome.faults, outcome.text]).removesuffix("; ")
                report.row(attack=name, tries=ATTACKS[name].tries, result=result, text=text, **outcome.cells)
                table.add_row(name, result, *outcome.cells.values(), text)
                for fault in outcome.faults:
                    report.fail(f"{name} is not contained: {fault}")
    report.add("attacks", len(arguments.only))
    report.add("contained", contained, "", f">= {len(arguments.only)}")
    Console(width=200, stderr=arguments.json).print(table)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
