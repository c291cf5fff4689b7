"""Defines a driver of GPUs: the questions that the gateway asks its library, and the variables that choose GPUs for a process."""

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
    """How much of a GPU, or of a slice of one, all processes of the machine use."""

    id: str
    number: int
    """The number of the GPU in the library's order."""
    name: str
    memory_bytes: int
    """Without the memory that the driver keeps for itself."""
    used_bytes: int
    busy_share: float | None
    """The share of the last second in which it ran something; None if that is not known, as of a slice."""

    def is_named(self, text: str) -> bool:
        """Return True if an entry of the variable `visible` means this one: by its number, or the first part of its id."""
        return text == str(self.number) if text.isdecimal() else self.id.startswith(text)


class GpuDriver(ABC):
    """The library of one maker. `find`, `uses` and `held_by` block."""

    library: str
    """How messages name it."""
    package: str
    """The Python package that it needs."""
    visible: str
    """The environment variable with the GPUs that a process sees."""
    cdi_kind: str
    """The kind of devices under which the Container Device Interface names its GPUs."""

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
        """Return how much of each GPU is used, in their order; an empty list if there are none, or no library."""

    @abstractmethod
    def held_by(self, pid: int) -> Mapping[str, int]:
        """Return how many bytes of each GPU a process holds, by the GPU's id. GPUs that it does not use may be missing."""

    @abstractmethod
    def environment(self, ids: Sequence[str], memory_mb: int | None) -> dict[str, str]:
        """Return the variables with which a process sees only these GPUs, and may use `memory_mb` of each."""


@cache
def warn(text: str) -> None:
    """Log a warning once: the metrics ask again and again."""
    LOG.warning("%s", text)
