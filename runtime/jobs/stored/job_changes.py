"""Defines the changes of a commit of the store. Parts of the gateway react to them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class JobChanges:
    """The changes of one commit."""

    queued: set[str] = field(default_factory=set)
    """The functions to whose queue a job was added or returned."""
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    """(function, job id) of the cancelled jobs, whose attempts must be stopped."""
    changed: list[str] = field(default_factory=list)
    """The ids of the jobs whose state, progress or pieces changed."""
    notified: bool = False
    """True if webhook deliveries may be due."""
    stored: dict[str, int] = field(default_factory=dict)
    """The added bytes of inputs and results, by owner. `ALL` has the sum."""
