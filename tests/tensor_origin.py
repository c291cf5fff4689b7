"""Tensors in memory, as an origin to convert from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from pilotflame.snapshot.converting.origin import TensorSpec


class Given:
    """An origin of tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None) -> None:
        self._tensors, self.aliases = tensors, aliases or {}
        self.specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        return (self._tensors[name] for name in names)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, one after the other."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
