"""The peers' environments in build/peers: one each, exact pins, made once and again when the pins change.

    python infra/bench/warm_envs.py

torch, transformers and the model come from the environment that runs this, by a .pth file, behind a peer's own packages:
nothing of them is installed twice, and no peer can pull another build of torch. Hence `--no-deps`: peers/*.txt name every
package. LitServe is in our own environment (the extra `bench`).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

from warm_peers import APPS, PEERS

NAMES = ("bentoml", "ray")


def ready(name: str) -> Path:
    """The environment's folder, up to date."""
    folder, pins = PEERS / name, APPS / f"{name}.txt"
    kept = folder / "pins.txt"
    if kept.is_file() and kept.read_text() == pins.read_text():
        return folder
    print(f"making {folder.relative_to(PEERS.parents[1])}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "-r", str(pins)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "zz_behind.pth").write_text(f"{_behind()}\n")
    kept.write_text(pins.read_text())
    return folder


def _behind() -> Path:
    """The folder that has our torch in it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed: pip install '.[bench]' -c constraints.txt")
    return Path(spec.origin).parents[1]


def main() -> int:
    for name in NAMES:
        ready(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
