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
    """The rows of one batch, in all layers of a model. `cache` is what the model's forward pass gets.

    A method that raises, such as because memory has run out, has changed no row. Attention multiplies masked columns by 0, and 0 times NaN is
    NaN. So what a row has written is cleared when the row leaves, and memory without a row is always 0.
    """

    def __init__(self, layers: int, columns: int = LEAST_COLUMNS) -> None:
        """`columns` is the number of columns for which there is memory at first."""
        self.lengths: list[int] = []
        """The tokens of each row."""
        self.begin, self.end, self.tokens = 0, 0, 0
        """The columns of the present forward pass. The last `tokens` of them are new. Row number i has the columns [end - lengths[i], end).
        """
        self.least_columns = columns
        self._layers = [_Layer(self) for _ in range(layers)]
        self.cache = Cache(layers=[*self._layers])

    def extend(self, tokens: int) -> Tensor:
        """Make room for `tokens` more columns, which the next forward pass writes.

        Return its attention mask: (rows, columns), with 1 for the columns of a row and 0 for those before it.
        """
        width = max(self.lengths) + tokens
        for layer in self._layers:
            layer.reserve(len(self.lengths), width, self.end + tokens)
        self.end += tokens
        self.lengths = [length + tokens for length in self.lengths]
        self.begin, self.tokens = self.end - width, tokens
        starts = torch.tensor([width - length for length in self.lengths])
        return (torch.arange(width) >= starts[:, None]).long()

    def take_back(self, tokens: int) -> None:
        """Undo `extend`, after its forward pass has failed. The next pass writes the same columns."""
        self.end -= tokens
        self.lengths = [length - tokens for length in self.lengths]

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the last `tokens` tokens of each row: (rows, tokens)."""
        return torch.tensor(self.lengths)[:, None] + torch.arange(-tokens, 0)

    def join(self, other: Rows) -> None:
        """Append a copy of the only row of `other`."""
        length, row = other.lengths[0], len(self.lengths)
        pairs = list(zip(self._layers, other._layers, strict=True))
        for own, their in pairs:
            own.reserve(row + 1, max([length, *self.lengths]), self.end, like=their)
        for own, their in pairs:
            own.write(row, length, their)
        self.lengths.append(length)

    def free(self) -> None:
        """Free the memory of all layers. Rows that join later get new memory."""
        self.begin, self.end, self.tokens = 0, 0, 0
        for layer in self._layers:
            layer.free()

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def columns(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return the keys and values of the only row, for each layer: (heads, tokens, size of a head).

        None stands for a layer that shares the keys of another one.
        """
        return [layer.columns(0, self.lengths[0]) for layer in self._layers]

    def fill(self, tokens: int, columns: list[tuple[Tensor, Tensor] | None]) -> None:
        """Append tokens to the only row. The argument `columns` has the form of the result of `columns()`."""
        self.extend(tokens)
        for layer, pair in zip(self._layers, columns, strict=True):
            if pair is not None:
                layer.update(pair[0][None], pair[1][None])

    def leave(self, row: int) -> None:
        """Remove a row. The last row takes its number."""
        last = len(self.lengths) - 1
        for layer in self._layers:
            layer.clear(row)
            if row != last:
                layer.write(row, self.lengths[last], layer, last)
                layer.clear(last)
        self.lengths[row] = self.lengths[last]
        del self.lengths[last]


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer: (rows, heads, columns, size of a head).

    Its memory begins at the column `_first`, which may differ between layers.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self._first = self._used = 0
        """The number of the first column, and how many columns have been written."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("`update` makes the memory")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        rows, count, tokens = self._rows, key_states.shape[0], key_states.shape[2]
        if self.keys is None:
            self._new(key_states, value_states, count, max(rows.least_columns, rows.end - rows.begin))
            self._first, self._used = rows.begin, rows.end - rows.begin
        begin, end = rows.begin - self._first, rows.end - self._first
        keys, values = self._held()
        keys[:count, :, end - tokens : end] = key_states
        values[:count, :, end - tokens : end] = value_states
        return keys[:count, :, begin:end], values[:count, :, begin:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.end - self._rows.begin, 0

    def get_seq_length(self) -> int:
        """Return the number of columns before the new ones."""
        return self._rows.end - self._rows.begin - self._rows.tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def columns(self, row: int, length: int) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of a row in its last columns; None if the layer has no memory."""
        if self.keys is None or self.values is None:
            return None
        end = self._rows.end - self._first
        return self.keys[row, :, end - length : end], self.values[row, :, end - length : end]

    def reserve(self, rows: int, width: int, end: int, like: _Layer | None = None) -> None:
        """Make sure that there is memory for `rows` rows in the columns [end - width, end). This may move the columns of the
        present rows.

        A layer without memory gets memory only if `like` has memory. A layer that shares the keys of another layer never has memory.
        """
        keys, values = self.keys, self.values
        if keys is None or values is None:
            if like is not None and like.keys is not None and like.values is not None:
                least = self._rows.least_columns
                self._new(like.keys, like.values, rows, least if width < least else width + SPARE_COLUMNS)
                self._first, self._used = end - width, width
            return
        room, columns = keys.shape[0], keys.shape[2]
        if rows <= room and self._first <= end - width and end <= self._first + columns:
            self._used = max(self._used, end - self._first)
            return
        present, held = len(self._rows.lengths), max(self._rows.lengths, default=0)
        until = self._rows.end - self._first
        old = [tensor[:present, :, until - held : until] for tensor in (keys, values)]
        if rows > room or width >= columns:
            # New memory has the size that is needed now, so one long row does not enlarge the memory of many short ones.
            more = rows + rows // 2 if rows > room else rows
            self._new(keys, values, more, width + SPARE_COLUMNS)
            self._used = 0
        else:
            # Copy the old columns first, because they overlap with the new ones.
            old = [tensor.clone() for tensor in old]
        self._first = end - width
        self._used = max(self._used, width)
        begin = self._rows.end - held - self._first
        for tensor, moved in zip(self._held(), old, strict=True):
            tensor[:present, :, begin : begin + held] = moved

    def write(self, row: int, length: int, source: _Layer, source_row: int = 0) -> None:
        """Copy a row's last `length` columns from `source`, which may share the keys of another layer."""
        if (found := source.columns(source_row, length)) is not None:
            end = self._rows.end - self._first
            for tensor, copied in zip(self._held(), found, strict=True):
                tensor[row, :, end - length : end] = copied

    def clear(self, row: int) -> None:
        """Set what a row has written to 0."""
        if self.keys is not None:
            for tensor in self._held():
                tensor[row, :, : self._used] = 0

    def free(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self._first, self._used = False, 0, 0

    def _held(self) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            raise RuntimeError("a layer without keys is used")
        return self.keys, self.values

    def _new(self, like_keys: Tensor, like_values: Tensor, rows: int, columns: int) -> None:
        """Make new keys and values. All columns are 0 at first."""
        keys, values = (
            _zeros(like, (rows, like.shape[1], columns, like.shape[3])) for like in (like_keys, like_values)
        )
        self.dtype, self.device, self.is_initialized = like_keys.dtype, like_keys.device, True
        self.keys, self.values = keys, values


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

    def take_back(self, tokens: int) -> None:
        # The state may contain the tokens already, and cannot be restored. The row fails and leaves, which replaces the state.
        self.lengths = [self.lengths[0] - tokens]

    def leave(self, row: int) -> None:
        del self.lengths[row]
        self.cache = DynamicCache(config=self._config)
