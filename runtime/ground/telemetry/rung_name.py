"""Names the rungs on which a gateway can hold a function, from the warmest down."""

from __future__ import annotations

import enum


class RungName(enum.StrEnum):
    """How warm a function is on this node."""

    READY = "ready"
    """A worker with its weights."""
    PARKED = "parked"
    """A worker whose weights use no memory of devices."""
    ZYGOTE = "zygote"
    """A zygote: imports and skeleton, from which workers are forked."""
    RESIDENT = "resident"
    """No process, but fetched weights in memory. In `Usage`, this is part of `local_s`."""
    LOCAL = "local"
    """Only files: the code, and the weights on the disk unless the node's cache has evicted them."""
