"""Other loaders of a safetensors file to a device, for `gpu.py`. Loaders that are not installed are left out."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Load = Callable[[Path, str], dict[str, Any]]


def _safetensors(path: Path, device: str) -> dict[str, Any]:
    from safetensors.torch import load_file  # noqa: PLC0415

    return load_file(path, device=device)


def _fastsafetensors(path: Path, device: str) -> dict[str, Any]:
    # No import statement: it is installed on few machines.
    package = importlib.import_module("fastsafetensors")
    loader = package.SafeTensorsFileLoader(package.SingleGroup(), torch.device(device), nogds=True)
    loader.add_filenames({0: [str(path)]})
    try:
        buffer = loader.copy_files_to_device()
        return {key: buffer.get_tensor(key).clone() for key in buffer.key_to_rank_lidx}
    finally:
        loader.close()


def _runai(path: Path, device: str) -> dict[str, Any]:
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path), device=device)
        return dict(streamer.get_tensors())


LOADERS: dict[str, tuple[str, Load]] = {
    "safetensors": ("safetensors", _safetensors),
    "fastsafetensors": ("fastsafetensors", _fastsafetensors),
    "Run:ai streamer": ("runai_model_streamer", _runai),
}


def installed() -> list[str]:
    return [name for name, (package, _) in LOADERS.items() if importlib.util.find_spec(package) is not None]


def seconds(name: str, path: Path, device: str, finish: Callable[[], None]) -> float:
    """Load all tensors of a file once, and return how long it took."""
    started_s = time.perf_counter()
    tensors = LOADERS[name][1](path, device)
    finish()
    took_s = time.perf_counter() - started_s
    del tensors
    return took_s
