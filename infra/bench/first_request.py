"""From an activation to the first request for its weights: the fetcher's part of a cold start from object storage.

    python infra/bench/first_request.py [--rounds N]

The cache has nothing. Small weights with six assets lie on a local server that answers after 0 or 20 ms. The clock starts
where the gateway asks the fetcher to hold the snapshot; the server notes when requests come, on the same clock.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkpoint
from percentiles import median
from pilotflame.runtime.launching.fetcher_client import FetcherClient
from pilotflame.runtime.link.worker_spec import Weights, WorkerSpec
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from report import Report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from fault_server import Faults, FaultServer

LATENCIES_S = (0.0, 0.02)
ASSETS = 6
# The fetcher is there long before a call comes: it is started with the gateway.
_QUIET_S = 2.0
_DEADLINE_S = 60.0


def measure(report: Report, rounds: int) -> None:
    """Enters first_request_ms and its phases, for both latencies and with and without the deploy's copy."""
    data = checkpoint.checkpoint(checkpoint.QUICK)
    for latency_s in LATENCIES_S:
        for copied in (True, False):
            told = [asyncio.run(_activate(data, latency_s, copied)) for _ in range(rounds)]
            name = f"first_request{'' if copied else '_and_assets'}{'_at_20ms' if latency_s else ''}"
            report.add(f"{name}_ms", median([one["first"] for one in told]), "ms", "<= 5" if copied else "")
            report.add(f"{name}_held_ms", median([one["held"] for one in told]), "ms")
            report.add(f"{name}_weight_ms", median([one["weight"] for one in told]), "ms")
            report.add(f"{name}_asset_requests", median([one["asset_requests"] for one in told]))
            for number, one in enumerate(told, 1):
                report.row(group="first request", round=number, latency_s=latency_s, copied=copied, **one)
    report.note(
        "first_request_ms: from the activation until the server sees a request; held: until workers may map the files;"
        " weight: until it sees one for weights. and_assets: the deploy has no copy of the six assets"
    )


async def _activate(data: checkpoint.Checkpoint, latency_s: float, copied: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="pilotflame-first-") as name:
        source = Path(name) / "source"
        source.mkdir()
        shutil.copyfile(data.path, source / checkpoint.SAFETENSORS)
        for number in range(ASSETS):
            (source / f"config{number}.json").write_text(f"[{number}, {'0' * 1000 * number}1]")
        create(source).write(source / MANIFEST_NAME)
        with FaultServer(source, Faults(latency_s=latency_s)) as server:
            async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
                client = FetcherClient(Path(name) / "cache", tasks)
                told = await _hold(client, server, source, copied)
                await client.close()
    return told


async def _hold(client: FetcherClient, server: FaultServer, source: Path, copied: bool) -> dict[str, Any]:
    root = source if copied else source / "none"
    weights = Weights(root=root, manifest=source / MANIFEST_NAME, source=server.url)
    spec = WorkerSpec(function="first", revision="r1", code=source, weights=(weights,))
    await client.warm(spec, {})
    await asyncio.sleep(_QUIET_S)
    started_s = time.monotonic()
    progress = await client.hold(weights, {})
    held_s = time.monotonic()
    await progress.ended
    if progress.error is not None:
        raise progress.error
    asked = [one.when_s for one in server.requests if one.name.endswith(".safetensors")]
    client.release(progress)
    return {
        "first": (min(one.when_s for one in server.requests) - started_s) * 1e3,
        "weight": (min(asked) - started_s) * 1e3,
        "held": (held_s - started_s) * 1e3,
        "asset_requests": len(server.requests) - len(asked),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The first request of a fetch.")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    report = Report("bench-snapshot-first")
    measure(report, arguments.rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
