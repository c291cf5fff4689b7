"""Defines a driver of GPUs.

It asks a maker's library about the GPUs, and names the variables that choose GPUs for a process.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ..scaling.placement import Gpu

LOG = logging.getLogger("pilotflame")
MIB = 1 << 20


class GpuUse(NamedTuple):
    """How much of a GPU, or of a slice of a GPU, all processes of the machine use."""

    id: str
    number: int
    """The number of the GPU in the library's order."""
    name: str
    memory_bytes: int
    """The memory of the GPU, except the memory that the driver keeps for itself."""
    used_bytes: int
    busy_share: float | None
    """The share of the last second in which the GPU ran something; None if that is not known, for example for a slice."""

    def is_named(self, text: str) -> bool:
        """Return True if `text`, an entry of the variable `visible`, names this GPU by its number or by the first part
        of its id.
        """
        return text == str(self.number) if text.isdecimal() else self.id.startswith(text)


class GpuDriver(ABC):
    """The library of one maker of GPUs. `find`, `uses` and `held_by` block."""

    library: str
    """The name of the library in messages."""
    package: str
    """The Python package through which the library is used."""
    visible: str
    """The environment variable with the GPUs that a process sees."""
    cdi_kind: str
    """The kind of these GPUs in the Container Device Interface (CDI)."""

    def find(self) -> list[Gpu]:
        """Return the GPUs of this machine that the gateway sees. If a GPU is cut into slices, return its slices."""
        seen = os.environ.get(self.visible)
        names = None if seen is None else [text.strip() for text in seen.split(",") if text.strip()]
        return [
            Gpu(one.id, one.memory_bytes // MIB)
            for one in self.uses()
            if names is None or any(one.is_named(name) for name in names)
        ]

    @abstractmethod
    def uses(self) -> list[GpuUse]:
        """Return the use of each GPU, in the library's order; an empty list if there is no GPU or no library."""

    @abstractmethod
    def held_by(self, pid: int) -> Mapping[str, int]:
        """Return how many bytes of each GPU a process holds, by the GPU's id. GPUs that the process does not use may be
        missing.
        """

    @abstractmethod
    def environment(self, ids: Sequence[str], memory_mb: int | None) -> dict[str, str]:
        """Return the variables that let a process see only these GPUs, and use at most `memory_mb` of each."""


@cache
def warn(text: str) -> None:
    """Log a warning. Do nothing if the same text was logged before, because each reading of the metrics causes it
    again.
    """
    LOG.warning("%s", text)
