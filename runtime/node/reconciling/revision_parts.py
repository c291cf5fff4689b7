"""Defines the parts of one revision that its observations, its steps and its events share."""

from __future__ import annotations

from typing import Protocol

from ...calls.link.worker_spec import WorkerSpec
from ...calls.serving.replicas import ReplicaList
from ...calls.serving.revision import Revision
from ...ground.telemetry.logs import RevisionLog
from ..scaling.revision_state import Phase
from .drain import Drain
from .function import Function
from .idle_ladder import LadderTarget
from .node_parts import NodeParts
from .pool import Pool
from .reconciler import Member
from .start_outcomes import StartOutcomes


class RevisionParts(LadderTarget, Member, Protocol):
    """One revision with its workers (revision_workers.py)."""

    spec: WorkerSpec
    function: Function
    node: NodeParts
    logs: RevisionLog
    phase: Phase
    rollover: int
    """While it is deployed: how many workers should be ready when it goes live."""
    replicas: ReplicaList
    revision: Revision
    starts: StartOutcomes
    drain: Drain
    pool: Pool
