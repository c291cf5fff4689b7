"""Answers requests with vLLM's engine, for which the weights come from a snapshot."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

# The tokenizer's threads would not survive the fork of a worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers import AutoTokenizer

from ...errors import HandlerFailed, SnapshotError
from ..caller import origin
from ..language_model.adapters import check_adapter
from ..language_model.contract import Delta, GenerationRequest
from .adapters import VllmAdapters
from .answers import typed_failures
from .loader import LOAD_FORMAT, OWNER_VARIABLE
from .requests import VllmRequests

if TYPE_CHECKING:
    from ...snapshot.adapters import Adapters
    from ...snapshot.handle import Snapshot
    from ..contract import Context

FIXED = ("model", "tokenizer", "load_format", "model_loader_extra_config")
"""The arguments of vLLM's engine that follow from the snapshot."""
DEFAULTS = {
    "enable_sleep_mode": True, "scheduling_policy": "priority", "disable_log_stats": True,
    # The hits of a shared cache would tell a caller what other callers have sent.
    "enable_prefix_caching": False,
}  # fmt: skip
ENVIRONMENT = {
    # A fork of a worker, which has threads, could hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The engine waits for weights that are being fetched. A fetch may take as long.
    "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
    # By default, vLLM sends facts about the machine and the model to its authors.
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables that vLLM reads. `env` in pilotflame.toml may set them otherwise."""


class VllmModel:
    """The tokenizer and the chat template of a model, and vLLM's engine, which `setup` starts in a worker."""

    def __init__(self, snapshot: Snapshot, *, adapters: Adapters | None = None, **engine_args: Any) -> None:
        """The snapshot is the folder of a model: config.json, tokenizer files, safetensors. Call it in the hook `build`.

        `adapters` are `context.adapters`. `engine_args` are fields of vLLM's AsyncEngineArgs, except those in FIXED. Raise SnapshotError
        if vLLM cannot use the snapshot or an adapter, and TypeError for a field in FIXED.
        """
        if fixed := sorted({*FIXED} & engine_args.keys()):
            raise TypeError(f"VllmModel() sets {fixed[0]} itself, from the snapshot.")
        if snapshot.manifest.part is not None:
            raise SnapshotError(
                "vLLM needs the whole snapshot.", remedy="Remove snapshot_part: vLLM cuts tensors itself."
            )
        self._snapshot = snapshot
        # vLLM's process waits for the bytes of each tensor, so the worker need not wait for all of them.
        snapshot.gated = True
        self.tokenizer: Any = AutoTokenizer.from_pretrained(snapshot.path)
        self._requests = VllmRequests(self.tokenizer, snapshot.path)
        self._adapters = VllmAdapters(adapters) if adapters else None
        loras = self._adapters.engine_args if self._adapters is not None else {}
        self._engine_args = DEFAULTS | loras | engine_args
        self._engine: Any = None
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        """Start the engine. Call it in the hook `setup`: vLLM starts processes and uses the device.

        Blocks the event loop until the weights are on the device, as vLLM's own server does. Raise what vLLM raises.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        from vllm import AsyncEngineArgs  # noqa: PLC0415  vLLM must not be imported before the fork of a worker
        from vllm.config import StructuredOutputsConfig  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        # The backend "guidance" compiles the same grammars as the own engine.
        given = {"structured_outputs_config": StructuredOutputsConfig(backend="guidance")} | self._engine_args
        arguments = AsyncEngineArgs(
            model=str(self._snapshot.path), load_format=LOAD_FORMAT,
            model_loader_extra_config=self._snapshot.reference(), **given,
        )  # fmt: skip
        self._context = context
        self._engine = AsyncLLM.from_engine_args(arguments)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Yield the pieces of the answers as they are made. The last piece of each answer says why it has ended.

        If the iterator is closed, vLLM aborts the request. Raises InputInvalid if the request does not fit the model, Overloaded if
        vLLM's queue is full, and HandlerFailed if vLLM fails. If the engine has died, the worker retires.
        """
        engine = self._running()
        with typed_failures(self._retire):
            check_adapter(request.adapter, self._adapters.names if self._adapters is not None else [])
            most_tokens = int(engine.model_config.max_model_len)
            if request.prompt_only:
                yield await asyncio.to_thread(self._requests.listed, request, most_tokens)
                return
            made = await asyncio.to_thread(self._requests.make, request, most_tokens)
            lora = await self._adapters.request(request.adapter) if self._adapters is not None else None
            outputs = engine.generate(
                {"prompt_token_ids": made.ids}, made.params, secrets.token_hex(8), lora_request=lora,
                priority=origin.get().rank(request.priority),
            )  # fmt: skip
            # vLLM aborts a request whose generator is closed.
            async with aclosing(outputs):
                async for output in outputs:
                    for delta in made.answers.deltas(output):
                        yield delta

    async def sleep(self) -> None:
        """Move the weights to host memory and drop the keys and values. Call it in the hook `park`."""
        await self._running().sleep(level=1)

    async def wake(self) -> None:
        """Move the weights back to the device. Call it in the hook `unpark`. Raise EngineDeadError if the engine has died."""
        await self._running().wake_up()

    def teardown(self) -> None:
        """End the engine's processes. Call it in the hook `teardown`; the engine may sleep."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _running(self) -> Any:
        if self._engine is None:
            raise HandlerFailed(
                "vLLM's engine does not run.",
                remedy="Define `async def setup(context): await context.state.setup(context)`.",
            )
        return self._engine

    def _retire(self) -> None:
        if self._context is not None:
            self._context.retire()
