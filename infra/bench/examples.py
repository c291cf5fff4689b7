"""The examples in templates/examples: cold start and memory of each, as rows of the table in their README.

python infra/bench/examples.py [--rounds 9] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from control import Control, gateway
from pilotflame.runtime.command.commands import minilm

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
EXAMPLES = TEMPLATES / "examples"
EMBEDDING = "text-embedding"
# Bodies that are not JSON: their file in the example's folder.
FILES = {"image": ("circle.png", "image/png"), "speech": ("hello.wav", "audio/wav")}


def names() -> list[str]:
    """Return the names of the examples, and of the template that is listed with them."""
    return [EMBEDDING, *sorted(path.parent.name for path in EXAMPLES.glob("*/pilotflame.toml"))]


def prepared(name: str, target: Path) -> Path:
    """Copy an example to a folder below `target`, make its weights there, and return the folder."""
    source = TEMPLATES / name if name == EMBEDDING else EXAMPLES / name
    folder = target / name
    shutil.copytree(source, folder)
    if (folder / "make_weights.py").exists():
        subprocess.run([sys.executable, "make_weights.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def measure(control: Control, name: str, folder: Path, rounds: int) -> str:
    """Return the row of an example: cold start, the same call when warm, the memory of a worker, and of the rest at zero."""
    settings: dict[str, Any] = {"name": name, "scale.idle_timeout_s": 0.5, "scale.max": 1}
    if name == EMBEDDING:
        settings["snapshot"] = str(minilm.model_folder())
    if name == "queue":
        # Without a queue to read from.
        settings["source"] = []
    control.deploy(str(folder), **settings)
    file, media = FILES.get(name, ("test_input.json", "application/json"))
    body = (folder / file).read_bytes()
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        # A function that starts fast has no standby until it was called.
        control.wait_for(name, workers=0, standby=True if cold else None)
        cold.append(control.post(name, body, media).ms)
        warm.append(control.post(name, body, media).ms)
    processes = control.status(name, memory=True)["processes"]
    worker_mb = sum(one["pss_mb"] for one in processes if one["role"] == "worker")
    rest_mb = sum(one["pss_mb"] for one in processes) - worker_mb
    return (
        f"| {name} | {median(cold):.0f} ms | {median(warm):.0f} ms | {worker_mb:.0f} MB | {rest_mb:.0f} MB |"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("names", nargs="*", default=names())
    arguments = options.parse_args()
    os.environ.update(minilm.OFFLINE)
    with tempfile.TemporaryDirectory() as target, gateway() as (_, control):
        print("| example | from zero | warm | a worker | at rest |\n|---|---|---|---|---|")
        for name in arguments.names:
            print(measure(control, name, prepared(name, Path(target)), arguments.rounds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
