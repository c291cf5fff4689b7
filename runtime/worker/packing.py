"""Packing: which items of a group share a call of the handler. A pure function."""

from __future__ import annotations

from collections.abc import Sequence


def pack(costs: Sequence[float], max_size: int, max_cost: float | None = None) -> list[list[int]]:
    """Every index of `costs` once, in lists of at most `max_size` that cost at most `max_cost` together.

    All of it in its own order, if it fits in one. What has to be split is sorted by cost, so that items of about the
    same size go together and little is spent on padding; the cheap ones go first. One that costs more than `max_cost`
    is alone.
    """
    limit = float("inf") if max_cost is None else max_cost
    if len(costs) <= max_size and sum(costs) <= limit:
        return [list(range(len(costs)))] if costs else []
    packed: list[list[int]] = []
    spent = 0.0
    for index in sorted(range(len(costs)), key=costs.__getitem__):
        if not packed or len(packed[-1]) == max_size or spent + costs[index] > limit:
            packed.append([])
            spent = 0.0
        packed[-1].append(index)
        spent += costs[index]
    return packed
