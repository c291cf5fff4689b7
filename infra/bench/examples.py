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

from control import Control
from pilotflame.runtime.commands import minilm
from servers import start_pilotflame

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
EXAMPLES = TEMPLATES / "examples"
EMBEDDING = "text-embedding"
# Bodies that are not JSON: their file in the example's folder.
FILES = {"image": ("circle.png", "image/png"), "speech": ("hello.wav", "audio/wav")}
IDLE_S = 0.5


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


def body_of(name: str, folder: Path) -> tuple[bytes, str]:
    """Return the body of the example's request, and its media type."""
    file, media = FILES.get(name, ("test_input.json", "application/json"))
    return (folder / file).read_bytes(), media


def measure(control: Control, name: str, folder: Path, rounds: int) -> str:
    """Return the example's row: its cold start in ms, the same call when warm, the memory of worker and at rest."""
    settings: dict[str, Any] = {"name": name, "scale.idle_timeout_s": IDLE_S, "scale.max": 1}
    if name == EMBEDDING:
        settings["snapshot"] = str(minilm.model_folder())
    if name == "queue":
        # Without a queue to read from.
        settings["source"] = []
    control.deploy(str(folder), **settings)
    body, media = body_of(name, folder)
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        # A function that starts fast has no standby until it was called.
        control.wait_for(name, workers=0, standby=True if cold else None)
        cold.append(control.post_ms(name, body, media))
        warm.append(control.post_ms(name, body, media))
    processes = control.status(name, memory=True)["processes"]
    worker_mb = sum(one["pss_mb"] for one in processes if one["role"] == "worker")
    rest_mb = sum(one["pss_mb"] for one in processes) - worker_mb
    return (
        f"| {name} | {median(cold):.0f} ms | {median(warm):.0f} ms | {worker_mb:.0f} MB | {rest_mb:.0f} MB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("names", nargs="*", default=names())
    options = parser.parse_args()
    os.environ.update(minilm.OFFLINE)
    with tempfile.TemporaryDirectory() as target, start_pilotflame() as server:
        control = Control(server.url)
        print("| example | from zero | warm | a worker | at rest |\n|---|---|---|---|---|")
        for name in options.names:
            folder = prepared(name, Path(target))
            print(measure(control, name, folder, options.rounds), flush=True)
        control.close()


if __name__ == "__main__":
    main()
