"""Attention of one new token for each row: without the columns before a short row, and for all heads of a group at once.

transformers' function `sdpa` also reads the masked columns, so each row takes the time of the longest row. And without a mask, it reads the
keys and values of a group once for each of its heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

LEAST_MASKED = 128
"""If rows have at least this many masked columns in the mean, one call for each row is faster than one call for all rows."""
OTHERS = ("position_bias", "cache", "softcap")
"""Arguments that change the attention. If one of them is set, `former` is called for all rows at once."""

Attention = Callable[..., tuple[Tensor, Tensor | None]]

_used: ContextVar[bool] = ContextVar("ragged_attention", default=False)


@contextmanager
def ragged_attention() -> Iterator[None]:
    """Use this module's attention in the passes of this context. Use it only on a processor, because a device starts one kernel
    faster than one for each row.

    Passes elsewhere in the process are not affected.
    """
    former: Attention = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
    if not isinstance(former, _RaggedAttention):
        AttentionInterface.register("sdpa", _RaggedAttention(former))
    token = _used.set(True)
    try:
        yield
    finally:
        _used.reset(token)


class _RaggedAttention:
    """The function `sdpa`, which calls `former` for all rows at once, or for each row with its own columns.

    It takes queries (rows, heads, tokens, size), keys and values (rows, heads, columns, size) and a mask (rows, 1, tokens, columns).
    """

    def __init__(self, former: Attention) -> None:
        self._former = former

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        *more: Any, **others: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        # Do not read the context variable while a compiler traces the model, because the compiler cannot follow it.
        used = not torch.compiler.is_compiling() and _used.get()
        if used and attention_mask is None and _grouped(query, key, value, others):
            return _by_group(query, key, value, others.get("scaling")), None
        starts = _starts(query, attention_mask, others) if used else None
        if attention_mask is None or starts is None:
            return self._former(module, query, key, value, attention_mask, *more, **others)
        found = []
        for row, start in enumerate(starts):
            own = slice(row, row + 1)
            columns = key[own, :, start:], value[own, :, start:], attention_mask[own, :, :, start:]
            found.append(self._former(module, query[own], *columns, *more, **others)[0])
        return torch.cat(found), None


def _grouped(query: Tensor, key: Tensor, value: Tensor, others: dict[str, Any]) -> bool:
    """Return True if one new token has several heads for each head of the keys and values."""
    rows, heads, tokens, _ = query.shape
    plain = key.shape[:2] == value.shape[:2] and not any(others.get(name) is not None for name in OTHERS)
    return plain and tokens == 1 and rows == key.shape[0] and heads > key.shape[1]


def _by_group(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return the attention of one new token: (rows, 1, heads, size).

    The query heads of a group are passed as if they were tokens, so the keys and values of a group are read once.
    """
    rows, heads, tokens, size = query.shape
    groups = query.reshape(rows, key.shape[1], -1, size)
    found = torch.nn.functional.scaled_dot_product_attention(groups, key, value, scale=scale)
    return found.reshape(rows, tokens, heads, value.shape[-1])


def _starts(query: Tensor, mask: Tensor | None, others: dict[str, Any]) -> list[int] | None:
    """Return the first unmasked column of each row; None if one call for all rows is needed or faster."""
    rows, _, tokens, _ = query.shape
    if mask is None or any(others.get(name) is not None for name in OTHERS):
        return None
    if rows == 1 or tokens > 1 or mask.dtype != torch.bool or mask.shape[:3] != (rows, 1, 1):
        return None
    starts: list[int] = mask[:, 0, 0].to(torch.uint8).argmax(-1).tolist()
    return starts if sum(starts) >= LEAST_MASKED * rows else None
