"""Defines what a zygote and its workers need to know about a revision. It is sent to them as JSON."""

from __future__ import annotations

import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ...snapshot.handle import subject_of
from ..settings.resources import Resources

REQUEST_VARIABLE = "PILOTFLAME_ZYGOTE"
"""The environment variable of a container with the request to its first process, as JSON."""

# Zygotes and workers write the stacks of their threads to the log on this signal, also if they are stuck in native code.
STACKS_SIGNAL = signal.SIGRTMIN + 5
# A zygote that imports or builds a handler answers this signal with a POSITION frame.
POSITION_SIGNAL = signal.SIGRTMIN + 6


class Confinement(BaseModel):
    """The limits that a process of this machine puts on itself before it runs code of a function."""

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
    """Folders in `hidden` that it cannot list. It can read a file in them if it knows the file's name."""


class Weights(BaseModel):
    """One snapshot of a function as its workers and the fetcher see it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """Its name in the setting `snapshots`; "" for the snapshot of the setting `snapshot`."""
    root: Path
    """The folder or file of the weights; of a fetched snapshot, the folder of its other files (config, tokenizer)."""
    manifest: Path
    source: str = ""
    """The URL from which it is fetched; "" if `root` holds the weights."""
    cache: Path | None = None
    """The folder of the node's cache of fetched snapshots, if it is fetched."""
    mounted: tuple[Path, ...] = ()
    """In a container: the snapshot's folders in that cache, which alone are mounted."""

    @property
    def subject(self) -> str:
        """How messages name it; "" if it is the function's only one."""
        return subject_of(self.name)


class CompiledCode(BaseModel):
    """Where compilers keep their output for a function, as `runtime/worker/compiled_code.py` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    """The function's own folder."""
    code: str
    """A digest of the function's code and requirements, on which the compiled code depends."""
    limit_bytes: int
    """How much of it is kept for each key."""


class WorkerSpec(BaseModel):
    """The facts of a revision for its zygote and workers. It has no secrets: the BUILD frame has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str
    revision: str
    code: Path
    handler: str = "handler.py"
    resolver: str = ""
    """`Dialect.resolver` of the handler; "" for pilotflame's own handlers."""
    python: str = ""
    weights: tuple[Weights, ...] = ()
    concurrency: int = 1
    threads: int | None = None
    env: dict[str, str] = {}
    build_timeout_s: float = 600.0
    preload: tuple[str, ...] = ()
    image: str = ""
    """The container image that the function runs in; empty if it runs in processes of the gateway's machine."""
    resources: Resources = Resources()
    parks: bool = True
    """Whether the gateway may park its workers."""
    wait_for_weights: bool = False
    compiled: CompiledCode | None = None

    @property
    def label(self) -> str:
        return f"{self.function} {self.revision}"

    @property
    def remote(self) -> tuple[Weights, ...]:
        """The snapshots that are fetched to the node."""
        return tuple(one for one in self.weights if one.source)
