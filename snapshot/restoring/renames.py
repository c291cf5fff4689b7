"""Maps names of tensors in checkpoints to names in modules. Release 5 of transformers has renamed tensors of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def renaming_of(module: object) -> Callable[[str], str] | None:
    """Return a function from names in a checkpoint to names in `module`. None if `module` is no model of transformers.

    Some models of transformers also merge several stored tensors into one tensor. A view of a file cannot merge tensors,
    so such a tensor counts as missing.
    """
    mappings: Any = sys.modules.get("transformers.conversion_mapping")
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if mappings is None or loading is None or not hasattr(module, "base_model_prefix"):
        return None
    found = mappings.get_model_conversion_mapping(module)
    renamings = [one for one in found if isinstance(one, loading.WeightRenaming)]
    return lambda name: str(loading.rename_source_key(name, renamings, [])[0])
