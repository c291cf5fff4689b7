"""Lets vLLM read its weights from a snapshot: the load format "pilotflame", an entry point of the group `vllm.general_plugins`.

vLLM calls `register` in each of its processes. The engine runs in a process of its own, which maps the snapshot again:
the mapped pages are shared with the worker, and the weights are copied only to the device.
"""

from __future__ import annotations

import os
from typing import Any

from ...errors import SnapshotMismatch
from ...snapshot.handle import Snapshot
from .engine_process import end_with

LOAD_FORMAT = "pilotflame"
OWNER_VARIABLE = "PILOTFLAME_VLLM_OWNER"
"""The process id of the worker that starts the engine."""


def register() -> None:
    """Register the load format with vLLM. In the engine's process, also end this process when its worker dies."""
    _end_with_owner()
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader  # noqa: PLC0415

    @register_model_loader(LOAD_FORMAT)
    class SnapshotLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]  # vLLM may not be installed
        """Loads the snapshot whose reference is `model_loader_extra_config`."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the node's fetcher brings the weights."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            snapshot = Snapshot.referred(self.load_config.model_loader_extra_config)
            loaded: set[str] | None = model.load_weights(snapshot.arrived())
            # Raise if a file was changed while it was read.
            snapshot.check()
            # vLLM's own loader makes the same exception: quantised models have parameters that no file has.
            if loaded is not None and model_config.quantization is None:
                _check_all_loaded(model, loaded)


def _check_all_loaded(model: Any, loaded: set[str]) -> None:
    """Raise SnapshotMismatch if a parameter was not loaded. Parameters that vLLM makes after loading do not count."""
    made_later = {
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
        for parameter, _ in module.named_parameters()
    }
    missing = sorted({name for name, _ in model.named_parameters()} - loaded - made_later)
    if missing:
        raise SnapshotMismatch(
            f"{len(missing)} parameters of the model are not in the snapshot, such as {missing[0]}.",
            remedy="Use the weights that belong to config.json.",
        )


def _end_with_owner() -> None:
    """Let the kernel kill this process when its parent dies, if its parent is the worker that owns the engine.

    A worker that is killed cannot end its engine, which would keep the memory of the GPU.
    """
    if os.environ.get(OWNER_VARIABLE) == str(parent := os.getppid()):
        end_with(parent)
