"""What a worker is started with."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from ..leftovers.signals import AuthorsHandlers
from ..link.worker_spec import WorkerSpec
from .function_setup import Built


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The connection to the gateway, and the function."""

    sock: socket.socket
    spec: WorkerSpec
    built: Built
    authors_handlers: AuthorsHandlers = field(default_factory=AuthorsHandlers)
    rehearsal_mb: int | None = None
    """How much memory of each GPU `rehearse` may use: 0 if it must not run, None for no limit."""
    at_end: Callable[[], None] = lambda: None
    """Called at the end of the process."""
