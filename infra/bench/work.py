"""The handlers of `make bench` and `make bench-warm` without our gateway: for LitServe, and for the floor without a server."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = {
    "hello": HERE / "functions" / "hello",
    "sleep": HERE / "functions" / "sleep",
    "minilm": HERE.parents[1] / "templates" / "text-embedding",
}
Work = Callable[[list[Any]], list[Any]]


def load(handler: str, model: str, threads: int) -> Work:
    """Return a callable from a list of events to a list of answers. It runs the code that our gateway runs."""
    sys.path.insert(0, str(FOLDERS[handler]))
    code = importlib.import_module("handler")
    if handler == "hello":
        return lambda events: [code.handler(event) for event in events]
    if handler == "sleep":
        return code.handler  # type: ignore[no-any-return]
    import torch  # noqa: PLC0415
    from transformers import AutoModel  # noqa: PLC0415

    torch.set_num_threads(threads)
    encoder = code.Encoder(Path(model), torch.float32)
    encoder.model = AutoModel.from_pretrained(model).eval()
    encoder.embed([code.SAMPLE])
    return lambda events: [
        {"embedding": one} for one, _ in encoder.embed([event["text"] for event in events])
    ]


class BareWork:
    """The work in a process of its own: batches of one size, one after the other."""

    def __init__(self, handler: str, model: str, threads: int, event: Any) -> None:
        self._work, self._event = load(handler, model, threads), event

    def run(self, batch: int, count: int) -> None:
        for _ in range(count):
            self._work([self._event] * batch)

    def check(self) -> None:
        """Do nothing. The servers run the same code, and their answers are checked."""

    def clear(self) -> None:
        """Do nothing, because nothing is kept."""
