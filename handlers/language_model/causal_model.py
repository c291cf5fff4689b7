"""Calls an unmodified causal model of transformers with rows of keys and values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .adapters import ModelAdapters
from .ragged_attention import ragged_attention
from .rows import Alone, Rows
from .widened_linear import widen

if TYPE_CHECKING:
    from ...snapshot.format.manifest import Manifest

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# These kinds of positions depend on the largest position of a batch, so a long row would change the results of other rows.
ROPES_OF_A_BATCH = {"dynamic", "longrope"}
OWN_CACHES = {"deepseek_v4", "minimax"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CausalModel:
    """A model and the way to call it. All its methods run on the model's device, and only one thread runs them at a time."""

    def __init__(
        self, model: nn.Module, config: PretrainedConfig, adapters: ModelAdapters | None = None
    ) -> None:
        self.module, self.adapters = model, adapters
        widen(model)
        self._config = config
        self._text: PretrainedConfig = config.get_text_config(decoder=True)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        # transformers 5.24 has renamed the argument.
        self._cache = (
            "cache" if "cache" in self._takes and "past_key_values" not in self._takes else "past_key_values"
        )
        self.why_alone = why_alone(self._text, self._takes)
        """Why its sequences run one at a time; "" if they run together."""
        self.most_tokens = int(getattr(self._text, "max_position_embeddings", 0) or 1 << 20)
        """The most tokens that a sequence may have."""

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, in which a pass spends nearly all of its time. Empty if the model has no ModuleList with only its layers."""
        count = int(self._text.num_hidden_layers)
        lists = (one for one in self.module.modules() if isinstance(one, nn.ModuleList))
        return next(([*one] for one in lists if len(one) == count), [])

    def wait(self) -> None:
        """Wait until the device has done what this thread has submitted. On a CPU, there is nothing to wait for."""
        device = next(self.module.parameters()).device
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, and so of keys and values."""
        return next(self.module.parameters()).dtype

    def new_rows(self, columns: int = 0) -> Rows:
        """Return rows without a sequence, with room for `columns` tokens."""
        if self.why_alone:
            return Alone(self._text)
        layers = int(self._text.num_hidden_layers)
        return Rows(layers, columns) if columns else Rows(layers)

    def forward(
        self, rows: Rows, ids: list[list[int]], adapters: Sequence[str] = (), *, every: bool = False
    ) -> Tensor:
        """Append the tokens `ids` (rows, tokens) to the rows. Return the logits after the last tokens: (rows, vocabulary). With `every`, return
        the logits after each token of the only row: (tokens, vocabulary).

        `adapters` has the name of each row's adapter, or "" for a row without one. By default, no row has one. If the model raises, the
        rows are as before.
        """
        tokens, device = len(ids[0]), next(self.module.parameters()).device
        mask = rows.extend(tokens)
        try:
            logits = self._pass(rows, ids, mask.to(device), adapters, every)
            return logits[0] if every else logits[:, -1]
        except Exception:
            rows.take_back(tokens)
            raise

    def _pass(
        self, rows: Rows, ids: list[list[int]], mask: Tensor, adapters: Sequence[str], every: bool
    ) -> Tensor:
        device = mask.device
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": mask,
            "position_ids": rows.positions(len(ids[0])).to(device),
            self._cache: rows.cache,
            "use_cache": True,
            "logits_to_keep": len(ids[0]) if every else 1,
        }
        taken = {name: value for name, value in arguments.items() if name in self._takes}
        attention = ragged_attention() if device.type == "cpu" else nullcontext()
        with torch.inference_mode(), attention:
            if self.adapters is None:
                found = self.module(**taken)
            else:
                found = self.adapters.forward(adapters or [""] * len(ids), taken)
            logits: Tensor = found.logits
        return logits


def conversion_note(manifest: Manifest, dtype: torch.dtype) -> str:
    """Return a sentence for the deployer if most weights must be converted to the type of config.json; else ""."""
    other = sum(entry.size_bytes for entry in manifest.tensors if _DTYPES.get(entry.dtype, dtype) != dtype)
    text = f"Most weights do not have config.json's {dtype}. A copy stays in memory: use `pilotflame snapshot convert --dtype`."
    return text if 2 * other > sum(entry.size_bytes for entry in manifest.tensors) else ""


def keep_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert to float32 the weights that transformers keeps in float32 in a model of type `dtype`. Call this before the weights have bytes."""
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if dtype not in (torch.float16, torch.bfloat16) or not kept:
        return
    pattern = re.compile(rf"(^|\.)({'|'.join(name.replace('*', '.*') for name in kept)})($|\.)")
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if pattern.search(name):
            tensor.data = tensor.data.float()


def why_alone(config: PretrainedConfig, takes: frozenset[str]) -> str:
    """Return why the sequences of a model cannot share a forward pass; "" if they can."""
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        return f"its layers of type {min(others)} keep a state"
    if config.model_type in OWN_CACHES or "cache_params" in takes:
        return "it keeps a cache of its own kind"
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        kind = rope.get("rope_type", rope.get("type", "")) if isinstance(rope, dict) else ""
        if kind in ROPES_OF_A_BATCH:
            return f"its positions of type {kind} depend on the longest sequence"
    if not takes & {"past_key_values", "cache"}:
        return "its forward pass takes no cache"
    return ""
