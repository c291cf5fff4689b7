"""Keys and values of the beginnings that many prompts share, such as a system prompt with tools.

They are a snapshot of their own: `pilotflame snapshot prefixes` writes it, and workers fetch, verify and map it as they do with weights. A
prompt with such a beginning copies it into its row instead of reading it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from ...errors import SnapshotError
from .causal_model import CausalModel
from .rows import Rows

if TYPE_CHECKING:
    from ...snapshot.handle import Snapshot

FILE = "prefixes.json"
TENSORS = "prefixes.safetensors"


class Prefix(NamedTuple):
    """A beginning of prompts."""

    name: str
    ids: tuple[int, ...]


def write(model: CausalModel, prefixes: Sequence[Prefix], origin: Mapping[str, str], folder: Path) -> None:
    """Read the prefixes with the model, and write their keys and values into a folder.

    `origin` has the facts about the model on which they depend. Raise SnapshotError if the model keeps something else.
    """
    if model.why_alone:
        message = f"This model has no prefixes, because {model.why_alone}."
        raise SnapshotError(message, remedy="Leave the prefixes out.")
    tensors: dict[str, Tensor] = {}
    for prefix in prefixes:
        rows = model.new_rows(len(prefix.ids))
        rows.lengths = [0]
        model.forward(rows, [[*prefix.ids]])
        for layer, pair in enumerate(rows.columns()):
            if pair is not None:
                for kind, tensor in zip(("keys", "values"), pair, strict=True):
                    tensors[f"{prefix.name}.{layer}.{kind}"] = tensor.cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS)
    listed = {prefix.name: list(prefix.ids) for prefix in prefixes}
    text = json.dumps({"origin": dict(origin), "layers": rows.layers, "prefixes": listed})
    (folder / FILE).write_text(text, encoding="utf-8")


@dataclass
class Prefixes:
    """The prefixes of a snapshot. The tensors are there once a worker has opened it."""

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
