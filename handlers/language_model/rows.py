"""Keeps the keys and values of several sequences, so that one forward pass of an unmodified model continues them all.

The rows of a batch end at the same column, and the columns before a shorter row are masked. So the distance between two
columns of a row is the distance between their tokens, and the masks that a model makes itself (sliding windows, chunks, ALiBi)
are right. A step writes one column, and attention reads a view. If the last column is used, the columns move to the
front, at most once in SPARE_COLUMNS steps.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

LEAST_COLUMNS = SPARE_COLUMNS = 256


class Rows:
    """The rows of one batch, in all layers of a model. `cache` is what the model's forward pass gets."""

    def __init__(self, layers: int, columns: int = LEAST_COLUMNS) -> None:
        """`columns` is the number of columns that have room at first."""
        self.lengths: list[int] = []
        """The tokens of each row."""
        self.begin, self.end, self.tokens = 0, 0, 0
        """The columns of the present forward pass. The last `tokens` of them are new. Row number i has the columns
        [end - lengths[i], end).
        """
        self.room = (1, columns)
        """The rows and columns that have memory in each layer."""
        self._layers = [_Layer(self) for _ in range(layers)]
        self.cache = Cache(layers=[*self._layers])

    def extend(self, tokens: int) -> Tensor:
        """Make room for `tokens` more columns, which the next forward pass writes.

        Return its attention mask: (rows, columns), with 1 for the columns of a row and 0 for those before it.
        """
        width = max(self.lengths) + tokens
        if self.end + tokens > self.room[1]:
            self._make_room(len(self.lengths), width)
        self.end += tokens
        self.lengths = [length + tokens for length in self.lengths]
        self.begin, self.tokens = self.end - width, tokens
        starts = torch.tensor([width - length for length in self.lengths])
        return (torch.arange(width) >= starts[:, None]).long()

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the last `tokens` tokens of each row: (rows, tokens)."""
        return torch.tensor(self.lengths)[:, None] + torch.arange(-tokens, 0)

    def join(self, other: Rows) -> None:
        """Append a copy of the only row of `other`."""
        length, rows = other.lengths[0], len(self.lengths) + 1
        if rows == 1 or rows > self.room[0] or self.end < length:
            self._make_room(rows, max([length, *self.lengths]))
        for own, their in zip(self._layers, other._layers, strict=True):
            own.write(len(self.lengths), self.end - length, self.end, their, other.end - length)
        self.lengths.append(length)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def columns(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return the keys and values of the only row, for each layer: (heads, tokens, size of a head).

        None stands for a layer that shares the keys of another one.
        """
        begin = self.end - self.lengths[0]
        return [layer.columns(begin, self.end) for layer in self._layers]

    def fill(self, tokens: int, columns: list[tuple[Tensor, Tensor] | None]) -> None:
        """Append tokens to the only row. The argument `columns` has the form of the result of `columns()`."""
        self.extend(tokens)
        for layer, pair in zip(self._layers, columns, strict=True):
            if pair is not None:
                layer.update(pair[0][None], pair[1][None])

    def leave(self, row: int) -> None:
        """Remove a row. The last row takes its number."""
        last = len(self.lengths) - 1
        if row != last:
            start = self.end - self.lengths[last]
            for layer in self._layers:
                layer.write(row, start, self.end, layer, start, last)
            self.lengths[row] = self.lengths[last]
        del self.lengths[last]
        if not self.lengths:
            self.begin = self.end = 0

    def _make_room(self, rows: int, width: int) -> None:
        """Move the columns to the front, so that there is room for `rows` rows of `width` columns, and for more columns.

        If a row is to join, the columns end at `width`. Else they begin with the first column.
        """
        held = max(self.lengths, default=0)
        end = max(held, width) if rows > len(self.lengths) else held
        fresh = rows > self.room[0] or width + 1 > self.room[1]
        if fresh:
            # New memory has the size that is needed now, so one long row does not enlarge the memory of many short ones.
            self.room = (rows + rows // 2 if rows > self.room[0] else rows, width + SPARE_COLUMNS)
        for layer in self._layers:
            layer.move(len(self.lengths), self.end - held, self.end, end, fresh=fresh)
        self.begin, self.end = end - held, end


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer: (rows, heads, columns, size of a head)."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._held(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        rows, count, tokens = self._rows, key_states.shape[0], key_states.shape[2]
        keys, values = self._held(key_states, value_states)
        keys[:count, :, rows.end - tokens : rows.end] = key_states
        values[:count, :, rows.end - tokens : rows.end] = value_states
        return keys[:count, :, rows.begin : rows.end], values[:count, :, rows.begin : rows.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.end - self._rows.begin, 0

    def get_seq_length(self) -> int:
        """Return the number of columns before the new ones."""
        return self._rows.end - self._rows.begin - self._rows.tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def columns(self, begin: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Return the first row's keys and values in some columns; None if there are none."""
        if self.keys is None or self.values is None:
            return None
        return self.keys[0, :, begin:end], self.values[0, :, begin:end]

    def write(self, row: int, begin: int, end: int, source: _Layer, at: int, source_row: int = 0) -> None:
        """Copy a row's columns from `source`, where they begin at column `at`.

        A layer that shares the keys of another layer has none, and is left out.
        """
        if source.keys is not None and source.values is not None:
            keys, values = self._held(source.keys, source.values)
            until = at + end - begin
            keys[row, :, begin:end] = source.keys[source_row, :, at:until]
            values[row, :, begin:end] = source.values[source_row, :, at:until]

    def move(self, rows: int, begin: int, end: int, to_end: int, *, fresh: bool) -> None:
        """Move the columns [begin, end) of the first rows, so that they end at `to_end`, and with `fresh` to new memory."""
        keys, values = self.keys, self.values
        if keys is None or values is None:
            return
        held_keys, held_values = keys[:rows, :, begin:end], values[:rows, :, begin:end]
        if fresh:
            keys, values = self._new(keys, values)
        else:
            # The old and the new columns overlap.
            held_keys, held_values = held_keys.clone(), held_values.clone()
        keys[:rows, :, to_end - (end - begin) : to_end] = held_keys
        values[:rows, :, to_end - (end - begin) : to_end] = held_values

    def _held(self, like_keys: Tensor, like_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values, which the first call makes."""
        if self.keys is None or self.values is None:
            return self._new(like_keys, like_values)
        return self.keys, self.values

    def _new(self, like_keys: Tensor, like_values: Tensor) -> tuple[Tensor, Tensor]:
        """Make new keys and values. All columns are 0 at first, because attention multiplies masked values by 0."""
        self.dtype, self.device, self.is_initialized = like_keys.dtype, like_keys.device, True
        rows, columns = self._rows.room
        self.keys, self.values = (
            _zeros(like, (rows, like.shape[1], columns, like.shape[3])) for like in (like_keys, like_values)
        )
        return self.keys, self.values


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of the type and on the device of `like`. On a CPU, pages that are never written take no memory and no time."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, max(1, math.prod(shape) * like.element_size()))
    return torch.frombuffer(pages, dtype=like.dtype, count=math.prod(shape)).view(shape)


class Alone(Rows):
    """The one row of a model whose layers keep something else than keys and values, such as a state."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(0)
        self._config = config
        self.cache = DynamicCache(config=config)

    def extend(self, tokens: int) -> Tensor:
        self.lengths = [self.lengths[0] + tokens]
        return torch.ones((1, self.lengths[0]), dtype=torch.long)

    def join(self, other: Rows) -> None:
        self.lengths, self.cache = list(other.lengths), other.cache

    def leave(self, row: int) -> None:
        del self.lengths[row]
        self.cache = DynamicCache(config=self._config)
