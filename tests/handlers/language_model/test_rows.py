"""Rows keep the keys and values of their sequences, and take no more memory than these need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.handlers.language_model import rows as rows_module
from pilotflame.handlers.language_model.rows import SPARE_COLUMNS, Rows

HEADS, SIZE = 2, 4


def one_row(tokens: list[float]) -> Rows:
    """Return rows with one row, whose keys are these numbers."""
    rows = Rows(2, len(tokens))
    rows.lengths = [0]
    write(rows, [tokens])
    return rows


def write(rows: Rows, tokens: list[list[float]]) -> list[torch.Tensor]:
    """Write keys and values as a forward pass does. Return the keys that each layer's attention sees."""
    rows.extend(len(tokens[0]))
    states = torch.tensor(tokens)[:, None, :, None].expand(len(tokens), HEADS, len(tokens[0]), SIZE)
    return [layer.update(states, -states)[0] for layer in rows._layers]


@contextmanager
def memory_for(count: int) -> Iterator[None]:
    """Let memory run out after some allocations."""
    left, zeros = itertools.count(count, -1), rows_module._zeros

    def limited(*arguments: Any) -> torch.Tensor:
        if not next(left):
            raise MemoryError
        return zeros(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_zeros", limited)
        yield


def joins(rows: Rows, other: Rows) -> bool:
    try:
        rows.join(other)
    except MemoryError:
        return False
    return True


class Model:
    """Rows, and their expected keys as lists."""

    def __init__(self) -> None:
        self.rows, self.held, self.next = Rows(2), list[list[float]](), 1.0

    def numbers(self, count: int) -> list[float]:
        self.next += count
        return [self.next - back for back in range(count, 0, -1)]

    def check(self, seen: list[torch.Tensor]) -> None:
        for layer in self.rows._layers:
            assert layer.keys is not None
            assert not layer.keys[len(self.held) :].any(), "a row that left is still in memory"
        for keys in seen:
            for number, row in enumerate(self.held):
                assert keys[number, 0, keys.shape[2] - len(row) :, 0].tolist() == row
                assert bool(keys.isfinite().all())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.integers(1, 900), st.sampled_from(["step", "leave", "fail"])), max_size=40),
    st.randoms(),
)
def test_rows_hold_what_was_written(actions: list[int | str], chance: object) -> None:
    model, fails = Model(), False
    for action in actions:
        if isinstance(action, int):
            tokens = model.numbers(action)
            joining = one_row(tokens)
            with memory_for(chance.choice([0, 1, 3]) if fails else 99):  # type: ignore[attr-defined]
                if joins(model.rows, joining):
                    model.held.append(tokens)
            fails = False
        elif action == "fail":
            fails = True
        elif action == "leave" and model.held:
            number = chance.randrange(len(model.held))  # type: ignore[attr-defined]
            model.rows.leave(number)
            model.held[number] = model.held[-1]
            model.held.pop()
        if model.held:
            new = [model.numbers(1) for _ in model.held]
            for row, (number,) in zip(model.held, new, strict=True):
                row.append(number)
            seen = write(model.rows, new)
            model.check(seen)


def test_a_long_row_leaves_no_memory_to_many_short_ones() -> None:
    rows = Rows(2)
    rows.join(one_row([1.0] * 3000))
    rows.leave(0)
    for _ in range(8):
        rows.join(one_row([1.0] * 10))
    for layer in rows._layers:
        assert layer.keys is not None
        assert (layer.keys.shape[0] <= 12, layer.keys.shape[2]) == (True, 10 + SPARE_COLUMNS)
