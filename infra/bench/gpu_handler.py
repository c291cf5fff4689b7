"""The handler of `gpu_functions.py`: a language model on a device. `model.json` beside it has its shape and the device.

`python handler.py SNAPSHOT` is a fresh process, which prints its first answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import checkpoint
from llama import Llama, next_token, skeleton

GIVEN = json.loads((Path(__file__).parent / "model.json").read_text())


def build(context: Any) -> Llama:
    with context.snapshot.skeleton():
        model = skeleton(checkpoint.Shape(**GIVEN["shape"]))
    context.snapshot.restore(model, device=GIVEN["device"])
    return model


def rehearse(context: Any) -> None:
    handler({"token": 1}, context)


def handler(event: dict[str, int], context: Any) -> dict[str, int]:
    return {"token": next_token(context.state, event["token"])}


def first_answer(root: Path) -> int:
    """Build and restore as a worker does, without a gateway, and return the first answer."""
    from pilotflame.handlers.contract import Context  # noqa: PLC0415
    from pilotflame.snapshot.format.manifest import Manifest  # noqa: PLC0415
    from pilotflame.snapshot.handle import Snapshot  # noqa: PLC0415
    from pilotflame.snapshot.named import Snapshots  # noqa: PLC0415

    snapshots = Snapshots([Snapshot(root, Manifest.read(root))])
    state = build(Context("fresh", "r0", snapshots=snapshots))
    snapshots.open()
    with snapshots.gate():
        return handler({"token": GIVEN["token"]}, Context("fresh", "r0", snapshots=snapshots, state=state))[
            "token"
        ]


if __name__ == "__main__":
    print(first_answer(Path(sys.argv[1])), flush=True)
