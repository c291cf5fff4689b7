"""Reads what a model's authors have set in generation_config.json: defaults of sampling, and the tokens that end an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .sampling import Sampling

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class GenerationDefaults:
    """The defaults of the model in a folder."""

    def __init__(self, folder: Path) -> None:
        """A folder without generation_config.json has no defaults."""
        settings = _settings(folder)
        self._sampling = {name: settings[name] for name in _NAMES if settings.get(name) is not None}
        if settings.get("do_sample") is False:
            self._sampling["temperature"] = 0.0
        self._ends = settings.get("eos_token_id")

    def sampling(self, asked: Sampling) -> Sampling:
        """Return the defaults, in which the fields that a request has set replace those of the model."""
        return Sampling(**self._sampling | asked.model_dump(exclude_unset=True))

    def ends(self, *others: int | Iterable[int] | None) -> list[int]:
        """Return the tokens that end an answer, each once: those of the file and `others`."""
        found: dict[int, None] = {}
        for one in (self._ends, *others):
            if one is not None:
                found |= dict.fromkeys([one] if isinstance(one, int) else one)
        return list(found)


def seeded(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of answer number `index`, which has a seed of its own."""
    if not index or sampling.seed is None:
        return sampling
    # After the largest seed, continue with the smallest.
    seed = (sampling.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
    return sampling.model_copy(update={"seed": seed})


def _settings(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json, or {} if there is none."""
    file = folder / "generation_config.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return found if isinstance(found, dict) else {}
