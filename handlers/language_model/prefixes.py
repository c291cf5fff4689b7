"""Keys and values of the beginnings that many prompts share, such as a system prompt with tools.

They are a snapshot of their own. The first worker of a function with `[prefixes]`, or `pilotflame snapshot prefixes`, writes this
snapshot, and workers map it. If a prompt has such a beginning, its keys and values are copied into the row instead of being computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...errors import SnapshotError
from .causal_model import CausalModel
from .rows import Rows

if TYPE_CHECKING:
    from ...snapshot.handle import Snapshot

FILE = "prefixes.json"
TENSORS = "prefixes.safetensors"
# A part of the key of stored prefixes. Increase it when their files get another form.
FORMAT = 1
# A forward pass reads at most this many tokens of a prefix, which limits the memory of its masks.
READ_TOKENS = 1024


class Prefix(NamedTuple):
    """A beginning of prompts."""

    name: str
    ids: tuple[int, ...]


def key_of(prefixes: Sequence[Prefix], origin: Mapping[str, str]) -> str:
    """Return a digest of all facts on which the stored keys and values of these prefixes depend."""
    tokens = {prefix.name: prefix.ids for prefix in prefixes}
    facts = {"format": FORMAT, "torch": str(torch.__version__), "origin": dict(origin), "prefixes": tokens}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def check_keeps(model: CausalModel) -> None:
    """Raise SnapshotError if the model keeps something else than keys and values."""
    if model.why_alone:
        message = f"This model has no prefixes, because {model.why_alone}."
        raise SnapshotError(message, remedy="Leave the prefixes out.")


def write(
    model: CausalModel, prefixes: Sequence[Prefix], origin: Mapping[str, str], folder: Path,
    most_bytes: int | None = None,
) -> None:  # fmt: skip
    """Read the prefixes with the model, and write their keys and values into a folder.

    `origin` has the facts about the model on which they depend. Raise SnapshotError if the model keeps something else, or if
    keys and values take more than `most_bytes`, or if the folder cannot be written.
    """
    check_keeps(model)
    tensors: dict[str, Tensor] = {}
    size_bytes = 0
    for prefix in prefixes:
        rows = model.new_rows(len(prefix.ids))
        rows.lengths = [0]
        for begin in range(0, len(prefix.ids), READ_TOKENS):
            model.forward(rows, [[*prefix.ids[begin : begin + READ_TOKENS]]])
        for layer, pair in enumerate(rows.columns()):
            if pair is not None:
                for kind, tensor in zip(("keys", "values"), pair, strict=True):
                    if bool(tensor.isnan().any()):
                        message = f"The model computes NaN for the prefix {prefix.name!r}."
                        raise SnapshotError(message, remedy="Check the model's weights and its dtype.")
                    tensors[f"{prefix.name}.{layer}.{kind}"] = tensor.cpu().contiguous()
                    size_bytes += tensor.nbytes
        # Stop before all of them are in memory.
        if most_bytes is not None and size_bytes > most_bytes:
            message = (
                f"The prefixes take more than {most_bytes:,} bytes, which this node keeps for a function."
            )
            raise SnapshotError(message, remedy="Shorten them.")
    listed = {prefix.name: list(prefix.ids) for prefix in prefixes}
    text = json.dumps({"origin": dict(origin), "layers": rows.layers, "prefixes": listed})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / TENSORS)
        (folder / FILE).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        message = f"The prefixes cannot be written to {folder}: {why}."
        raise SnapshotError(message, remedy="Free some space, or choose another place.") from error


@dataclass
class Prefixes:
    """The prefixes of a snapshot. Their tensors exist once a worker has opened the snapshot."""

    snapshot: Snapshot
    _layers: int = 0
    _found: list[Prefix] = field(default_factory=list)

    def read(self, origin: Mapping[str, str]) -> None:
        """Read which prefixes there are. Raise SnapshotError if they were not made for the model with these facts."""
        remedy = "Make them again: pilotflame snapshot prefixes MODEL PREFIXES.json --output FOLDER."
        try:
            listed = json.loads((self.snapshot.path / FILE).read_text(encoding="utf-8"))
            made, self._layers = listed["origin"], int(listed["layers"])
            found = [Prefix(name, tuple(ids)) for name, ids in listed["prefixes"].items()]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"The snapshot of prefixes has no valid {FILE}: {error}."
            raise SnapshotError(message, remedy=remedy) from error
        if other := sorted(name for name in origin if made.get(name) != origin[name]):
            message = f"The prefixes were made for another model: {', '.join(other)} differ."
            raise SnapshotError(message, remedy=remedy)
        self._found = sorted(found, key=lambda prefix: -len(prefix.ids))

    def longest(self, ids: Sequence[int]) -> Prefix | None:
        """Return the longest prefix of a prompt that leaves at least one token to read; None if there is none."""
        fitting = (one for one in self._found if len(one.ids) < len(ids))
        return next((one for one in fitting if tuple(ids[: len(one.ids)]) == one.ids), None)

    def fill(self, rows: Rows, prefix: Prefix) -> None:
        """Begin an empty row with a prefix. Wait until the tensors have arrived."""
        self.snapshot.wait()
        held = self.snapshot.load(f"{prefix.name}.*")
        rows.fill(len(prefix.ids), [_pair(held, f"{prefix.name}.{layer}.") for layer in range(self._layers)])


def _pair(held: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values of a layer; None if it uses those of another layer."""
    return (held[f"{name}keys"], held[f"{name}values"]) if f"{name}keys" in held else None
