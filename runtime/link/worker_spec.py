"""What a zygote and its workers must know of a revision: passed as JSON, the same in a process or a container."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

WEIGHTS_TIMEOUT_S = 3600.0
"""How long a worker waits for all of its weights to arrive."""


class WorkerSpec(BaseModel):
    """One revision, seen from below. Holds no secrets: those travel over a worker's own link."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str
    revision: str
    code: Path
    handler: str = "handler.py"
    python: str = ""
    snapshot: Path | None = None
    manifest: Path | None = None
    source: str = ""
    """The URL the weights are fetched from; then `snapshot` holds only what lies beside them (config, tokenizer)."""
    cache: Path | None = None
    """The folder of the node's cache of fetched snapshots."""
    concurrency: int = 1
    threads: int | None = None
    env: dict[str, str] = {}
    preload: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.function} {self.revision}"
