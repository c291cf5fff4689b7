"""Names the rungs on which a gateway can hold a function, from the warmest down."""

from __future__ import annotations

import enum


class RungName(enum.StrEnum):
    """How warm a function is on this node."""

    READY = "ready"
    """A worker with its weights."""
    ZYGOTE = "zygote"
    """A zygote: imports and skeleton, from which workers are forked."""
    LOCAL = "local"
    """Only files: the code and, if it has any, the weights."""
    REMOTE = "remote"
    """Only the code: the weights must be fetched."""
