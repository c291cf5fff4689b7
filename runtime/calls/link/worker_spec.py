"""Defines the facts about a revision that its zygote and workers need. The gateway sends these facts as JSON."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ....snapshot.handle import folder_of, is_adapter, subject_of
from ....snapshot.sources.access import ANY, Access
from ...ground.settings.resources import Resources

REQUEST_VARIABLE = "PILOTFLAME_ZYGOTE"
"""The environment variable of a container with the request to its first process, as JSON."""

# Only the gateway reacts to these signals (startup/signals.py). Its other processes ignore these signals, because a terminal
# or a tool may send them to all processes.
OF_GATEWAY = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Zygotes and workers write the stacks of their threads to the log on this signal, even if the threads are stuck in
# native code.
STACKS_SIGNAL = signal.SIGRTMIN + 5
# A zygote that imports or builds a handler answers this signal with a POSITION frame.
POSITION_SIGNAL = signal.SIGRTMIN + 6


class Confinement(BaseModel):
    """The limits that a process of this machine puts on itself before it runs code of a function."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    joins: tuple[Path, ...] = ()
    """The files into which the process writes its pid to join its cgroup."""
    memory_kills: Path | None = None
    """The file in which the kernel counts the processes of the cgroup that it has killed because memory ran out."""
    tmp: Path | None = None
    """The folder for temporary files of the process (TMPDIR)."""
    hidden: tuple[Path, ...] = ()
    """Folders that the process cannot read, except the paths in `readable`. If there are any, it can write only to `tmp` and `writable`."""
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    """Folders in `hidden` that the process can read and write."""
    unlisted: tuple[Path, ...] = ()
    """Folders in `hidden` that the process cannot list. It can read a file in them if it knows the file's name."""


class Weights(BaseModel):
    """One snapshot of a function as its workers and the fetcher see it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """The snapshot's name in the setting `snapshots`; "" for the snapshot of the setting `snapshot`."""
    root: Path
    """The folder or file of the weights; for a fetched snapshot, the folder of its other files (config, tokenizer)."""
    manifest: Path
    assets: Path | None = None
    """A folder with copies of the files beside local weights, and links to the rest of `root`; None if workers use `root`."""
    versions: dict[str, str] = {}
    """The versions of local shards, by name, whose bytes the deploy has compared with the manifest (`file_version`)."""
    source: str = ""
    """The URL from which the snapshot is fetched; "" if `root` holds the weights."""
    access: Access = Field(ANY, exclude=True)
    """The rule for fetching the snapshot. Workers do not get it."""
    cache: Path | None = None
    """The folder of the node's cache of fetched snapshots; None if this snapshot is not fetched."""
    mounted: tuple[Path, ...] = ()
    """In a container: the snapshot's folders in `cache`, which are the only mounted folders of the cache."""

    @property
    def subject(self) -> str:
        """The name of the snapshot in messages; "" if the function has only one snapshot."""
        return subject_of(self.name)

    @property
    def folder(self) -> Path:
        """The folder of the weights, also if `root` is a file."""
        return folder_of(self.root)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The files and folders that workers read."""
        return (self.root, self.manifest) if self.assets is None else (self.root, self.manifest, self.assets)

    @property
    def on_use(self) -> bool:
        """True if it is an adapter, which is fetched when a worker first needs it."""
        return is_adapter(self.name)


class CompiledCode(BaseModel):
    """The folder where compilers keep their output for a function (see `runtime/calls/worker/compiled_code.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    """The function's own folder."""
    code: str
    """A digest of the function's code and requirements, on which the compiled code depends."""
    limit_bytes: int
    """The largest size of one folder of compiled code. Processes with the same packages and hardware share such a folder."""


class KeptPrefixes(BaseModel):
    """The beginnings of prompts that a function declares, and where its workers keep the keys and values of these prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    declared: dict[str, dict[str, Any]]
    folder: Path
    """The function's own folder."""
    limit_bytes: int
    """The largest total size of the kept keys and values."""


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
    start_timeout_s: float = 900.0
    preload: tuple[str, ...] = ()
    image: str = ""
    """The container image that the function runs in; empty if it runs in processes of the gateway's machine."""
    resources: Resources = Resources()
    parks: bool = True
    """True if the gateway may park the revision's workers."""
    wait_for_weights: bool = False
    compiled: CompiledCode | None = None
    prefixes: KeptPrefixes | None = None
    observers: tuple[str, ...] = ()
    """The functions of plugins ("package.module:name") that return a `CallObserver` (`runtime/calls/worker/runner.py`) or None."""

    @property
    def label(self) -> str:
        return f"{self.function} {self.revision}"

    @property
    def remote(self) -> tuple[Weights, ...]:
        """The snapshots that are fetched to the node."""
        return tuple(one for one in self.weights if one.source)
