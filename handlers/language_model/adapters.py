"""Puts adapters (LoRA, as peft writes them) into a model, so that each row of a batch uses its own. peft provides the layers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import InputInvalid, PilotflameError, SnapshotError, SnapshotMismatch
from ...snapshot.adapters import Adapters as AdapterSnapshots
from ...snapshot.extras import needs
from ...snapshot.handle import Snapshot
from .adapter_fetches import AdapterFetches

CONFIG = "adapter_config.json"
BASE = "__base__"
"""peft's name of a row without an adapter."""
# An adapter that sets one of these fields is refused, because its rows cannot share a batch with other rows.
_REFUSED = (
    "use_dora",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)


class ModelAdapters:
    """The adapters of a model. The least recently used one leaves the module if there are more than `most`. Pinned adapters, and
    adapters that rows use, stay in the module.

    `arrive` runs on an event loop. The other methods run on the thread of the model's steps.
    """

    def __init__(
        self, module: nn.Module, snapshots: AdapterSnapshots, most: int, pinned: Collection[str] = ()
    ) -> None:
        """Adapters in `pinned` never leave. Raise SnapshotError if an adapter's configuration cannot be used."""
        self._module, self._snapshots, self._most, self._pinned = module, snapshots, most, frozenset(pinned)
        for name in self._pinned:
            # Raise NoSuchSnapshot if there is no such adapter.
            _ = snapshots[name]
        self._configs = {name: _config(name, snapshots[name]) for name in snapshots}
        self._wrapped: Any = None
        """peft's model around the module, from the first adapter on."""
        self._loaded: dict[str, None] = {}
        """The adapters in the module, the least recently used first."""
        self._tried = set[str]()
        """The adapters with which the model has run once."""
        self._fetches = AdapterFetches(snapshots)

    @property
    def names(self) -> list[str]:
        """All adapters, whether they have arrived or not."""
        return list(self._configs)

    @property
    def loaded(self) -> list[str]:
        """The adapters in the module, the least recently used first."""
        return list(self._loaded)

    async def arrive(self, name: str) -> None:
        """Wait until all bytes of an adapter are on this node. The first call starts the fetch. Raise SnapshotError or SourceError."""
        await self._fetches.arrive(name)

    def load(self, name: str, used: Collection[str]) -> None:
        """Put an adapter that has arrived into the module, if it is not there. `used` are the adapters of the present rows.

        Raise SnapshotMismatch if its tensors do not fit the model.
        """
        if name not in self._loaded:
            self._insert(name)
        self._loaded.pop(name, None)
        self._loaded[name] = None
        for other in self.loaded:
            if len(self._loaded) <= self._most:
                return
            if other not in self._pinned and other not in used and other != name:
                self._remove(other, keep=name)
                del self._loaded[other]

    def forward(self, names: Sequence[str], arguments: Mapping[str, Any]) -> Any:
        """Call the module. `names` has the adapter of each row, or "" for a row without one."""
        if self._wrapped is None:
            return self._module(**arguments)
        return self._wrapped(**arguments, adapter_names=[_layer(name) if name else BASE for name in names])

    def _insert(self, name: str) -> None:
        from peft import set_peft_model_state_dict  # noqa: PLC0415  only models with adapters need it

        parameter = next(self._module.parameters())
        tensors = {
            key: tensor.to(parameter.device, parameter.dtype)
            for key, tensor in self._snapshots[name].load("*").items()
        }
        try:
            self._add_layers(name)
            found: Any = set_peft_model_state_dict(
                self._wrapped, tensors, _layer(name), low_cpu_mem_usage=True
            )
            missing = [key for key in found.missing_keys if f".{_layer(name)}." in key]
            if wrong := [*missing, *found.unexpected_keys]:
                raise SnapshotMismatch(_misfit(name, f"{len(wrong)} tensors, such as {wrong[0]}"))
            self._try(name, parameter.device)
        except (RuntimeError, ValueError, KeyError) as error:
            self._remove(name)
            raise SnapshotMismatch(_misfit(name, str(error)[:500])) from error
        except PilotflameError:
            self._remove(name)
            raise

    def _add_layers(self, name: str) -> None:
        """Put the layers of an adapter into the module. They have no memory yet."""
        from peft import PeftModel  # noqa: PLC0415

        config = self._configs[name]
        if self._wrapped is None:
            self._wrapped = PeftModel(
                self._module, config, _layer(name), autocast_adapter_dtype=False, low_cpu_mem_usage=True
            ).eval()
        else:
            self._wrapped.add_adapter(_layer(name), config, low_cpu_mem_usage=True)

    def _try(self, name: str, device: torch.device) -> None:
        """Read two tokens. This raises ValueError if the adapter changes a layer to which the model passes all rows as one.

        Such a layer would make later passes fail, also those without the adapter.
        """
        if name not in self._tried:
            with torch.inference_mode():
                self.forward([name], {"input_ids": torch.zeros(1, 2, dtype=torch.long, device=device)})
            self._tried.add(name)

    def _remove(self, name: str, keep: str = "") -> None:
        """Take an adapter out of the module, also if it was inserted in part."""
        if self._wrapped is None:
            return
        if not self._loaded:
            # Remove peft's model, too, because it needs at least one adapter.
            self._wrapped.unload()
            self._wrapped = None
        elif _layer(name) in self._wrapped.peft_config:
            if keep:
                # peft warns if the active adapter is deleted, so make another one active. This has no other effect, because
                # rows name their adapters.
                self._wrapped.set_adapter(_layer(keep))
            self._wrapped.delete_adapter(_layer(name))


def _layer(name: str) -> str:
    """Return peft's name of an adapter. It is a part of the names of the adapter's tensors, and no other part has this form."""
    return f"adapter-{name}"


def check_adapter(name: str | None, there: Collection[str]) -> None:
    """Raise InputInvalid if a request names an adapter that is not `there`."""
    if name is not None and name not in there:
        shown = f"there: {', '.join(there)}" if there else "it has none"
        raise InputInvalid(
            f"The model has no adapter {name!r} ({shown}).",
            remedy="Name it in [adapters] of pilotflame.toml.",
        )


def read_config(snapshot: Snapshot) -> dict[str, Any]:
    """Return the configuration of an adapter, as peft has saved it. Use it within `valid_config`."""
    found: dict[str, Any] = json.loads((snapshot.path / CONFIG).read_text())
    return found


@contextmanager
def valid_config(name: str) -> Iterator[None]:
    """Raise SnapshotError if the block, which reads the configuration of an adapter, fails."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SnapshotError(
            f"The adapter {name} has no valid {CONFIG}: {error!r}.",
            remedy="Save it with peft's `save_pretrained`.",
        ) from error


def _config(name: str, snapshot: Snapshot) -> Any:
    """Return the configuration of an adapter. Raise SnapshotError, which names the field, if it cannot be used."""
    with needs("language_model(adapters=...)", "peft"):
        from peft import LoraConfig  # noqa: PLC0415

    with valid_config(name):
        given = read_config(snapshot)
        config = LoraConfig.from_pretrained(str(snapshot.path)) if given["peft_type"] == "LORA" else None
    refused = [field for field in _REFUSED if given.get(field)]
    if config is None or refused or config.bias != "none":
        field = "peft_type" if config is None else refused[0] if refused else "bias"
        raise SnapshotError(
            f"The adapter {name} has {field} = {given.get(field)!r} in {CONFIG}: it cannot share a batch.",
            remedy="Only plain LoRA adapters can. Merge this one into the model, as a function of its own.",
        )
    config.inference_mode = True
    return config


def _misfit(name: str, what: str) -> str:
    return f"The adapter {name} does not fit the model: {what}."
