"""Measure torch, ONNX Runtime and OpenVINO with the handlers of their templates: python infra/bench/runtimes.py

A process imports the libraries that a zygote would import, and forks two workers, one after the other. Each worker opens the
snapshot, sets its model up and answers. The table has the time from the fork to the first answer, the time of a later answer
(4 inputs), and the memory of the two workers while both live. The weights are in the page cache, as after a fetch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
WIDTH, LAYERS, INPUTS, RUNS = 2048, 8, 4, 20
FIELDS = ("Pss", "Private_Dirty")
Answer = Callable[[np.ndarray], np.ndarray]


def network() -> nn.Module:
    """A network of 134 MB in float32."""
    torch.manual_seed(0)
    pairs = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*pairs).eval()


def template(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_{file}", ROOT / "templates" / name / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(kind: str, folder: Path) -> None:
    """Write the network as the template's make_weights.py would."""
    folder.mkdir()
    if kind == "torch":
        (folder / "weights").mkdir()
        save_file(network().state_dict(), folder / "weights" / "model.safetensors")
    else:
        made = template(kind, "make_weights")
        made.split(made.export(network(), WIDTH), folder)
    # Pages that are not written to the disk yet would count as dirty.
    os.sync()


def torch_answer(context: Any) -> Answer:
    module = context.module

    def run(inputs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = module(torch.from_numpy(inputs)).numpy()
        return found

    return run


def onnx_answer(context: Any, *, prepack: bool) -> Answer:
    handler = template("onnx", "handler")
    handler.PREPACK = prepack  # type: ignore[attr-defined]
    context.state = (context.folder / "model.onnx").read_bytes()
    session = handler.setup(context)
    return lambda inputs: session.run(None, {"x": inputs})[0]


def openvino_answer(context: Any) -> Answer:
    context.state = (context.folder / "model.xml").read_text()
    context.kept = model, _ = template("openvino", "handler").setup(context)
    return lambda inputs: model(inputs)[0]


CONTESTANTS: dict[str, tuple[str, Callable[[Any], Answer]]] = {
    "torch": ("torch", torch_answer),
    "ONNX Runtime": ("onnx", lambda context: onnx_answer(context, prepack=False)),
    "ONNX Runtime, `PREPACK`": ("onnx", lambda context: onnx_answer(context, prepack=True)),
    "OpenVINO": ("openvino", openvino_answer),
}


def memory() -> dict[str, float]:
    """Return this process's memory in megabytes."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) / 1000 for line in lines if line[0][:-1] in FIELDS}


def work(name: str, context: Any, forked_s: float, channel: multiprocessing.connection.Connection) -> None:
    """Run one worker: tell its times, and then its memory when the other worker lives too."""
    torch.set_num_threads(os.cpu_count() or 1)
    context.snapshot.open()
    answer = CONTESTANTS[name][1](context)
    inputs = np.ones((INPUTS, WIDTH), np.float32)
    first = answer(inputs)
    cold_ms = (time.monotonic() - forked_s) * 1000
    times_ms = []
    for _ in range(RUNS):
        began_s = time.monotonic()
        answer(inputs)
        times_ms.append((time.monotonic() - began_s) * 1000)
    channel.send({"cold_ms": cold_ms, "run_ms": statistics.median(times_ms), "sum": float(first.sum())})
    channel.recv()
    channel.send(memory())
    channel.recv()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of one contestant; the larger of its two workers' memory."""
    weights = folder / "weights"
    context = SimpleNamespace(folder=folder, snapshot=Snapshot(weights, create(weights)), state=None)
    if CONTESTANTS[name][0] == "torch":
        with context.snapshot.skeleton():
            context.module = network()
        context.snapshot.restore(context.module)
    forking = multiprocessing.get_context("fork")
    workers = []
    for _ in range(2):
        ours, theirs = forking.Pipe()
        process = forking.Process(target=work, args=(name, context, time.monotonic(), theirs))
        process.start()
        # A worker that fails then ends the pipe.
        theirs.close()
        workers.append((process, ours, ours.recv()))
    found = []
    for _, channel, _ in workers:
        channel.send("measure")
        found.append(channel.recv())
    for process, channel, _ in workers:
        channel.send("end")
        process.join()
    times = [told for _, _, told in workers]
    largest = {field: max(one[field] for one in found) for field in FIELDS}
    return {"name": name, **{key: min(one[key] for one in times) for key in times[0]}, **largest}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| runtime | fork to first answer | answer, 4 inputs | Pss | Private_Dirty |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['cold_ms']:.0f} ms | {row['run_ms']:.1f} ms | {row['Pss']:.0f} MB | {row['Private_Dirty']:.0f} MB |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    # As in a zygote: one thread until the fork.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        for kind in dict.fromkeys(kind for kind, _ in CONTESTANTS.values()):
            # In another process, so that no library of the export is in the workers.
            writer = multiprocessing.get_context("spawn").Process(target=write, args=(kind, Path(root, kind)))
            writer.start()
            writer.join()
        rows = [measure(name, Path(root, kind)) for name, (kind, _) in CONTESTANTS.items()]
    sums = {round(row["sum"], 1) for row in rows}
    sys.stdout.write(f"{json.dumps(rows) if arguments.json else table(rows)}\n")
    if len(sums) > 1:
        sys.exit(f"the answers differ: {sums}")


if __name__ == "__main__":
    main()
