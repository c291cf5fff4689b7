"""Rows keep the keys and values of their sequences, and take no more memory than these need."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.handlers.language_model.rows import SPARE_COLUMNS, Rows

HEADS, SIZE = 2, 4


def one_row(tokens: list[float]) -> Rows:
    """Return rows with one row, whose keys are these numbers."""
    rows = Rows(2, len(tokens))
    rows.lengths = [0]
    write(rows, [tokens])
    return rows


def write(rows: Rows, tokens: list[list[float]]) -> list[torch.Tensor]:
    """Do what a forward pass does. Return the keys that each layer's attention sees."""
    rows.extend(len(tokens[0]))
    states = torch.tensor(tokens)[:, None, :, None].expand(len(tokens), HEADS, len(tokens[0]), SIZE)
    return [layer.update(states, -states)[0] for layer in rows._layers]


class Model:
    """The rows as lists."""

    def __init__(self) -> None:
        self.rows, self.held, self.next = Rows(2), list[list[float]](), 1.0

    def numbers(self, count: int) -> list[float]:
        self.next += count
        return [self.next - back for back in range(count, 0, -1)]

    def check(self, seen: list[torch.Tensor]) -> None:
        for keys in seen:
            for number, row in enumerate(self.held):
                assert keys[number, 0, keys.shape[2] - len(row) :, 0].tolist() == row
                assert bool(keys.isfinite().all())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.integers(1, 900), st.sampled_from(["step", "leave"])), max_size=40), st.randoms()
)
def test_rows_hold_what_was_written(actions: list[int | str], chance: object) -> None:
    model = Model()
    for action in actions:
        if isinstance(action, int):
            tokens = model.numbers(action)
            model.rows.join(one_row(tokens))
            model.held.append(tokens)
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
    most, columns = rows.room
    assert (most <= 12, columns) == (True, 10 + SPARE_COLUMNS)
    assert all(layer.keys is not None and layer.keys.shape[2] == columns for layer in rows._layers)
