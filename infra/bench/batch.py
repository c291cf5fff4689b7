"""Batch mode: 10,000 lines through one trivial function, killed a few times on the way and resumed; every line once.

    python infra/bench/batch.py [--lines N] [--kills N] [--max-in-flight N]

Prints lines a second without a kill, then what the run with kills brought.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HANDLER = """
async def handler(event: int) -> int:
    return event * 2
"""
COMMAND = [sys.executable, "-m", "pilotflame.runtime.cli"]


@contextmanager
def gateway(folder: Path) -> Iterator[dict[str, str]]:
    """A gateway; gives the environment of commands that talk to it."""
    arguments = [*COMMAND, "serve", "--json", "--port", "0", "--state-dir", str(folder / "state")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        try:
            yield {**os.environ, "PILOTFLAME_URL": json.loads(process.stdout.readline())["url"]}
        finally:
            process.terminate()
            process.wait()


def batch(source: Path, output: Path, in_flight: int) -> list[str]:
    return [*COMMAND, "batch", "twice", str(source), str(output), "--max-in-flight", str(in_flight), "--json"]


def check(output: Path, count: int) -> None:
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    if found != [2 * number for number in range(count)]:
        raise RuntimeError(f"{output} does not hold every line once, in order")


def killed(command: list[str], environ: dict[str, str], after_s: float) -> bool:
    """Starts it and kills it after a while; False if it ended before."""
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--max-in-flight", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pf-batch-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "twice").mkdir()
        (folder / "twice" / "handler.py").write_text(HANDLER)
        source = folder / "in.jsonl"
        source.write_text("".join(f"{number}\n" for number in range(given.lines)))
        with gateway(folder) as environ:
            deploy = [
                *COMMAND,
                "deploy",
                str(folder / "twice"),
                "--set",
                "concurrency=32",
                "--set",
                "scale.max=2",
            ]
            subprocess.run(deploy, env=environ, check=True, stdout=subprocess.DEVNULL)
            whole = folder / "whole.jsonl"
            done = subprocess.run(
                batch(source, whole, given.max_in_flight), env=environ, check=True, capture_output=True
            )
            check(whole, given.lines)
            summary: dict[str, Any] = json.loads(done.stdout)
            seconds = summary["seconds"]
            print(f"{given.lines} lines: {seconds:.1f} s, {summary['lines_per_s']:.0f} lines/s")
            output, chance, kills = folder / "out.jsonl", random.Random(7), 0
            begun_s = time.monotonic()
            command = batch(source, output, given.max_in_flight)
            while kills < given.kills and killed(
                command, environ, 1.0 + chance.random() * seconds / given.kills
            ):
                kills += 1
            if kills:
                subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
            check(output, given.lines)
            took_s = time.monotonic() - begun_s
            print(f"killed {kills} times and resumed: {took_s:.1f} s, every line once, in order")


if __name__ == "__main__":
    main()
