"""Gives vLLM the adapters (LoRA) of a function: each is fetched when a request first names it."""

from __future__ import annotations

from typing import Any

from ...errors import SnapshotError
from ...snapshot.adapters import Adapters
from ..language_model.adapter_fetches import AdapterFetches
from ..language_model.adapters import CONFIG, read_config, valid_config

# The ranks that vLLM takes as `max_lora_rank`.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MOST_TOGETHER = 8
"""How many different adapters may share a step of the engine. vLLM reserves device memory for this number of adapters."""


class VllmAdapters:
    """The adapters of a function, as requests of vLLM."""

    def __init__(self, snapshots: Adapters) -> None:
        """Raise SnapshotError if an adapter is no LoRA adapter of peft, or if its rank is too large for vLLM."""
        self._fetches = AdapterFetches(snapshots)
        # vLLM knows adapters by numbers from 1 on.
        self._numbers = {name: number for number, name in enumerate(snapshots, 1)}
        self._rank = max((_rank(name, snapshots) for name in snapshots), default=1)

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    @property
    def engine_args(self) -> dict[str, Any]:
        """The arguments of the engine for these adapters. {} if there are none."""
        if not self._numbers:
            return {}
        rank = next(one for one in RANKS if one >= self._rank)
        return {
            "enable_lora": True,
            "max_loras": min(len(self._numbers), MOST_TOGETHER),
            "max_lora_rank": rank,
        }

    async def request(self, name: str | None) -> Any:
        """Wait until the bytes of an adapter are on this node, and return vLLM's LoRARequest for it. Return None without a name.

        Raise SnapshotError or SourceError if the adapter does not arrive.
        """
        if name is None:
            return None
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        arrived = await self._fetches.arrive(name)
        return LoRARequest(
            lora_name=name, lora_int_id=self._numbers[name], lora_path=str(arrived.files.resolve())
        )


def _rank(name: str, snapshots: Adapters) -> int:
    with valid_config(name):
        given = read_config(snapshots[name])
        kind, rank = given["peft_type"], int(given["r"])
    if kind != "LORA":
        raise _refusal(name, f"peft_type = {kind!r}")
    if rank > RANKS[-1]:
        raise _refusal(name, f"r = {rank}")
    return rank


def _refusal(name: str, fault: str) -> SnapshotError:
    return SnapshotError(
        f"The adapter {name} has {fault} in {CONFIG}, which vLLM does not take.",
        remedy=f"Use a LoRA adapter with a rank of at most {RANKS[-1]}.",
    )
