"""Starts vLLM's worker on processors without a forward pass of full size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    from vllm.v1.worker.cpu_worker import CPUWorker
except ImportError:
    # vLLM is no dependency, and another version may have the class elsewhere.
    CPUWorker: Any = object  # type: ignore[no-redef]

WARM_UP_TOKENS = 8


class SmallWarmUp(CPUWorker):  # type: ignore[misc, unused-ignore]
    """A worker that loads compiled code with a pass of few tokens.

    The pass of vLLM's own worker has as many tokens as a batch may have. It takes two minutes for 400 MB of weights. Its
    measurement has no effect if the configuration sets the memory for keys and values. The first pass, which compiles, keeps its
    full size, because the compiler uses the size.
    """

    def determine_available_memory(self) -> int:
        runner, compiled = self.model_runner, Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), "fxgraph")
        if not hasattr(runner, "max_num_tokens") or not compiled.is_dir():
            return int(super().determine_available_memory())
        most, runner.max_num_tokens = runner.max_num_tokens, min(WARM_UP_TOKENS, runner.max_num_tokens)
        try:
            return int(super().determine_available_memory())
        finally:
            runner.max_num_tokens = most
