"""The policy: how a revision treats its invocations, from its settings and what its handler is."""

from __future__ import annotations

from dataclasses import dataclass

from ..scaling import autoscaler


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds, counts, bytes."""

    scale: autoscaler.ScaleSpec
    timeout_s: float = 600.0
    execution_timeout_s: float | None = None
    batch: int = 1
    """How many a worker runs together."""
    on_loop: bool = False
    """Whether the handler is async, so that it can be interrupted."""
    hold_s: float = 60.0
    max_queue: int = 1000
    max_body_bytes: int = 20 << 20
    idempotent: bool = False
    standby: bool = True
    keep_zygote: bool = True
