"""Defines what a zygote and its workers need to know about a revision. It is sent to them as JSON."""

from __future__ import annotations

import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ..settings.function_settings import Resources

REQUEST_VARIABLE = "PILOTFLAME_ZYGOTE"
"""The environment variable of a container with the request to its first process, as JSON."""
WEIGHTS_TIMEOUT_S = 3600.0
"""How long a worker waits until all of its weights have arrived."""

# Workers answer this signal with the stacks of their threads, also if they are stuck. Handlers do not use it.
STACKS_SIGNAL = signal.SIGRTMIN + 5


class Confinement(BaseModel):
    """What a process of this machine does before it runs code of a function, so that it is held at its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    joins: tuple[Path, ...] = ()
    """The files into which it writes its pid to join its cgroup."""
    memory_kills: Path | None = None
    """Where the kernel counts the processes of that cgroup that it has killed because memory ran out."""
    tmp: Path | None = None
    """Its folder for temporary files (TMPDIR)."""
    hidden: tuple[Path, ...] = ()
    """Folders that it cannot read, but for `readable`. If there are any, it can write only to `tmp`."""
    readable: tuple[Path, ...] = ()
    unlisted: tuple[Path, ...] = ()
    """Folders in `hidden` of which it can read the files whose names it knows."""


class WorkerSpec(BaseModel):
    """One revision as its workers see it. It has no secrets: the ACTIVATE frame of each worker has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str
    revision: str
    code: Path
    handler: str = "handler.py"
    python: str = ""
    snapshot: Path | None = None
    manifest: Path | None = None
    source: str = ""
    """The URL of the weights; `snapshot` then holds only the other files (config, tokenizer)."""
    cache: Path | None = None
    """The folder of the node's cache of fetched snapshots."""
    mounted: tuple[Path, ...] = ()
    """In a container: the snapshot's folders in that cache, which alone are mounted."""
    concurrency: int = 1
    threads: int | None = None
    env: dict[str, str] = {}
    preload: tuple[str, ...] = ()
    image: str = ""
    """The container image that the function runs in; empty if it runs in processes of the gateway's machine."""
    resources: Resources = Resources()

    @property
    def label(self) -> str:
        return f"{self.function} {self.revision}"
