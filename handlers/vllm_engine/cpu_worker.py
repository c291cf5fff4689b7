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

    vLLM's own worker runs a pass with as many tokens as a batch may have, which takes two minutes for 400 MB of weights. This
    pass measures the memory for keys and values, but has no effect if the configuration sets this memory. If there is no compiled
    code yet, the pass keeps its full size, because the compiler uses the size.
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
