"""Batch mode: 10,000 lines through an empty function, once without a kill, and once killed several times and resumed.

python infra/bench/batch.py [--lines N] [--kills N]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from control import gateway
from report import Report, parser

HANDLER = "async def handler(event: int) -> int:\n    return event * 2\n"
IN_FLIGHT = 64


def command(source: Path, output: Path) -> list[str]:
    words = [sys.executable, "-m", "pilotflame.runtime.cli", "batch", "twice", str(source), str(output)]
    return [*words, "--max-in-flight", str(IN_FLIGHT), "--json"]


def is_right(output: Path, lines: int) -> bool:
    """Return whether the output has the answer to each line once, in order."""
    return [json.loads(line) for line in output.read_bytes().splitlines()] == [2 * n for n in range(lines)]


def run_and_kill(words: list[str], env: dict[str, str], after_s: float) -> bool:
    """Run a command, and kill it after a while. Return False if it ended before."""
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return True
    return False


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--lines", type=int, default=10_000)
    options.add_argument("--kills", type=int, default=5)
    arguments = options.parse_args()
    report, chance, kills = Report("bench-batch"), random.Random(7), 0
    with tempfile.TemporaryDirectory(prefix="pf-batch-", dir="/tmp") as name, gateway() as (server, control):
        folder = Path(name)
        control.deploy_code("twice", HANDLER, concurrency=32, **{"scale.max": 2})
        source, whole, resumed = folder / "in.jsonl", folder / "whole.jsonl", folder / "resumed.jsonl"
        source.write_text("".join(f"{number}\n" for number in range(arguments.lines)))
        env = {**os.environ, "PILOTFLAME_URL": server.url}
        begun_s = time.monotonic()
        subprocess.run(command(source, whole), env=env, check=True, stdout=subprocess.DEVNULL)
        took_s = time.monotonic() - begun_s
        report.add("lines_per_s", arguments.lines / took_s, "/s")
        report.add("whole_is_right", is_right(whole, arguments.lines), "", "== 1")
        words = command(source, resumed)
        while kills < arguments.kills and run_and_kill(
            words, env, 1 + chance.random() * took_s / arguments.kills
        ):
            kills += 1
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL)
        report.add("resumed_is_right", is_right(resumed, arguments.lines), f"after {kills} kills", "== 1")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
