"""Functions of 1.1 and 6 GB from zero, weights in the page cache: a cold call beside a warm one and fresh processes.

    python infra/bench/resident.py [--rounds N] [--large]

The handler is a llama that runs one token, so each call reads every weight once. The fresh processes start an
interpreter with the same handler, or read the weights with safetensors' `load_file`. What touching the weights costs is
measured too: reading a byte of every page of a new mapping, less doing that again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkpoint
from control import Control
from disk import drop
from percentiles import median
from pilotflame.runtime.commands.fresh_process import first_answer
from report import Report
from servers import start_pilotflame

_HERE = Path(__file__).resolve().parent
_NAME = "resident"
_WARM = 3
_EVENT = {"token": 7}
_TIMEOUT_S = 300.0
_HANDLER = """
import checkpoint
import torch
from llama import next_token, skeleton

SHAPE = checkpoint.Shape(**{shape!r})

def build(context):
    with context.snapshot.skeleton():
        model = skeleton(SHAPE).eval()
    context.snapshot.restore(model)
    return model

@torch.inference_mode()
def handler(event, context):
    return {{"token": next_token(context.state, event["token"])}}
"""
_LOADED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import handler as function
from safetensors.torch import load_file
model = function.skeleton(function.SHAPE).eval()
model.load_state_dict(load_file(sys.argv[2]), assign=True)
with torch.inference_mode():
    print(function.next_token(model, 7), flush=True)
"""
_TOUCHED = """
import sys, time
from pathlib import Path
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.mapping import Mapping
flats = Mapping(Path(sys.argv[1]), Manifest.read(Path(sys.argv[1]))).flats
seconds = []
for _ in range(2):
    started = time.perf_counter()
    for flat in flats:
        flat[::4096].sum().item()
    seconds.append(time.perf_counter() - started)
print((seconds[0] - seconds[1]) * 1e3)
"""


def measure(report: Report, data: checkpoint.Checkpoint, size: str, rounds: int) -> None:
    """Enters cold_minus_warm_<size>_ms and the figures to compare it with."""
    told: dict[str, list[float]] = {name: [] for name in ("cold", "warm", "fresh", "load_file", "touch")}
    drop(data.path)
    answers = set()
    with (
        tempfile.TemporaryDirectory(prefix="pilotflame-resident-") as name,
        _deployed(Path(name), data) as control,
    ):
        # The deploy has read the weights from the disk, and no process has touched them.
        report.add(f"resident_{size}_first_touch_ms", float(_output(_TOUCHED, str(data.folder))), "ms")
        for _ in range(rounds):
            control.wait_for(_NAME, workers=0, standby=True)
            replies = [control.invoke(_NAME, _EVENT) for _ in range(1 + _WARM)]
            if not replies[0].cold or any(reply.cold for reply in replies[1:]):
                raise RuntimeError("the first request of a round must be cold and the others warm")
            answers |= {reply.body["token"] for reply in replies}
            told["cold"].append(replies[0].ms)
            told["warm"].append(median([reply.ms for reply in replies[1:]]))
            answer, ms = first_answer(Path(name), data.folder, _EVENT)
            answers.add(answer["token"])
            told["fresh"].append(ms)
            answers.add(_loaded(Path(name), data, told["load_file"]))
            told["touch"].append(float(_output(_TOUCHED, str(data.folder))))
            report.row(group=f"resident {size}", **{key: figures[-1] for key, figures in told.items()})
    if len(answers) != 1:
        raise RuntimeError(f"the answers differ: {answers}")
    _enter(report, size, told)


def _enter(report: Report, size: str, told: dict[str, list[float]]) -> None:
    extra = [cold - warm for cold, warm in zip(told["cold"], told["warm"], strict=True)]
    above = [one - touch for one, touch in zip(extra, told["touch"], strict=True)]
    share = [one / fresh for one, fresh in zip(extra, told["fresh"], strict=True)]
    report.add(f"cold_minus_warm_{size}_ms", median(extra), "ms")
    report.add(f"cold_minus_warm_{size}_of_fresh", median(share), "", "<= 0.01")
    report.add(f"cold_minus_warm_{size}_above_touch_ms", median(above), "ms", "<= 50")
    for name, figures in told.items():
        report.add(f"resident_{size}_{name}_ms", median(figures), "ms")


@contextmanager
def _deployed(folder: Path, data: checkpoint.Checkpoint) -> Iterator[Control]:
    shape = dict(vars(data.shape))
    (folder / "handler.py").write_text(_HANDLER.format(shape=shape))
    for module in ("checkpoint.py", "llama.py"):
        shutil.copyfile(_HERE / module, folder / module)
    with start_pilotflame() as server:
        control = Control(server.url)
        try:
            settings = {"snapshot": str(data.folder), "name": _NAME, "scale.idle_timeout_s": 0.4}
            control.deploy(str(folder), **settings)
            yield control
        finally:
            control.close()


def _loaded(folder: Path, data: checkpoint.Checkpoint, figures: list[float]) -> int:
    started_s = time.perf_counter()
    answer = int(_output(_LOADED, str(folder), str(data.path)))
    figures.append((time.perf_counter() - started_s) * 1e3)
    return answer


def _output(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Cold calls of functions whose weights are resident.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="the 6 GB one too")
    arguments = parser.parse_args()
    report = Report("bench-snapshot-resident", packages=("torch", "safetensors"))
    measure(report, checkpoint.checkpoint(checkpoint.FULL), "1gb", arguments.rounds)
    if arguments.large:
        giant = checkpoint.snapshot(checkpoint.GIANT, checkpoint.DATA / checkpoint.BUCKET)
        measure(report, giant, "6gb", arguments.rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
