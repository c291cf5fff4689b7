"""Answers requests with vLLM's engine, for which the weights come from a snapshot."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

# Let the tokenizer start no threads, because they would not survive the fork of a worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoTokenizer

from ...errors import HandlerFailed, SnapshotError
from ..caller import origin
from ..language_model.adapters import check_adapter
from ..language_model.contract import Delta, GenerationRequest
from .adapters import VllmAdapters
from .answers import typed_failures
from .engine_process import (
    WaitingEngine,
    engine_core_in,
    forget_devices,
    has_descriptors_of_processes,
    import_ahead,
    missing_name,
    thread_count,
)
from .loader import LOAD_FORMAT, OWNER_VARIABLE
from .requests import VllmRequests

if TYPE_CHECKING:
    from ...snapshot.adapters import Adapters
    from ...snapshot.handle import Snapshot
    from ..contract import Context

FIXED = ("model", "tokenizer", "load_format", "model_loader_extra_config")
"""The arguments of vLLM's engine that follow from the snapshot."""
DEFAULTS = {
    "scheduling_policy": "priority", "disable_log_stats": True,
    # Off, because the hits of a shared cache would tell a caller what other callers have sent.
    "enable_prefix_caching": False,
}  # fmt: skip
ENVIRONMENT = {
    # Later starts skip the run that measures the memory for keys and values.
    "VLLM_ENABLE_STARTUP_PLAN": "1",
    # How long vLLM waits for its engine, which waits for the fetch of the weights.
    "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
    # By default, vLLM sends facts about the machine and the model to its authors.
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables that vLLM reads. `env` in pilotflame.toml may set them otherwise."""


CPU_CACHE_BYTES = 1 << 30
"""The memory for keys and values without a GPU, unless `kv_cache_memory_bytes` or VLLM_CPU_KVCACHE_SPACE says otherwise."""


def configured(folder: str, engine_args: dict[str, Any]) -> Any:
    """Return the VllmConfig of the model in a folder. `engine_args` override DEFAULTS. Raise what vLLM raises."""
    from vllm import AsyncEngineArgs  # noqa: PLC0415  vLLM is no dependency
    from vllm.config import StructuredOutputsConfig  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    # The backend "guidance" compiles the same grammars as pilotflame's own engine.
    given = DEFAULTS | {"structured_outputs_config": StructuredOutputsConfig(backend="guidance")}
    given["enable_sleep_mode"] = current_platform.is_sleep_mode_available()
    if current_platform.is_cpu():
        # -1 is as many tokens as there is memory for.
        given |= {"enforce_eager": True, "max_model_len": -1}
        # vLLM 0.32 cannot load on processors what it compiles ahead of time, so each start would compile again
        # (vllm/compilation/decorators.py calls `finalize_loading` of a plain function).
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            # Otherwise, vLLM takes nearly all memory of the machine.
            given["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        if (given | engine_args).get("kv_cache_memory_bytes") is not None:
            from .cpu_worker import SmallWarmUp  # noqa: PLC0415  it imports vLLM

            if SmallWarmUp.__base__ is not object:
                given["worker_cls"] = f"{SmallWarmUp.__module__}.{SmallWarmUp.__qualname__}"
    if all(
        engine_args.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "pipeline", "prefill_context")
    ):
        # Pass the executor as a class. On processors, vLLM would replace an executor that is given by its name, because only a
        # new process reads OpenMP's variables. Without this private name, vLLM chooses the executor.
        with suppress(ImportError):
            from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415

            given["distributed_executor_backend"] = UniProcExecutor
    given |= {"model": folder, "load_format": LOAD_FORMAT} | engine_args
    return AsyncEngineArgs(**given).create_engine_config()


class VllmModel:
    """The tokenizer and the chat template of a model, vLLM's configuration, and its engine, which `setup` starts in a worker.

    The engine core runs in a process that `forked` forks. If `forked` is not called, or `_lack` names a reason,
    vLLM starts the process itself, which takes tens of seconds.
    """

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
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        self._config = configured(str(snapshot.path), loras | engine_args)
        self._logs_no_stats = bool(engine_args.get("disable_log_stats", True))
        # If vLLM cannot run in a fork, import nothing ahead, because its own process imports the modules again.
        if missing_name() is None:
            import_ahead(self._config)
        self._waiting: WaitingEngine | None = None
        self._engine: Any = None
        self._ended = False
        self._context: Context | None = None

    def forked(self) -> None:
        """Fork the process of the engine core, which waits for `setup`. Call it in the hook `forked`. Raise OSError."""
        if lack := self._lack():
            sys.stderr.write(f"vLLM starts its processes itself, which takes tens of seconds: {lack}\n")
        else:
            self._waiting = WaitingEngine(self._config)

    def _lack(self) -> str:
        """Return why the engine core cannot run in a fork of this process; "" if it can."""
        if (name := missing_name()) is not None:
            return f"this version of vLLM has no {name} as expected"
        if (threads := thread_count()) > 1:
            return f"the import or the build has left {threads - 1} threads"
        if self._config.parallel_config.data_parallel_size > 1:
            return "data_parallel_size is more than 1"
        if self._config.parallel_config.numa_bind:
            return "numa_bind needs a new interpreter"
        if getattr(self._config.model_config.multimodal_config, "mm_tensor_ipc", "") == "torch_shm":
            return "mm_tensor_ipc is torch_shm"
        return "" if has_descriptors_of_processes() else "the kernel is older than 5.3"

    async def setup(self, context: Context) -> None:
        """Start the engine, and wait until the weights are on the device. Call it in the hook `setup`. Raise what vLLM raises."""
        threads = torch.get_num_threads()
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        # Without this variable, vLLM has one thread.
        if self._config.device_config.device_type == "cpu":
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # Make the path relative, because a socket's path has 107 characters at most, and the folder's absolute path may be longer.
        os.environ.setdefault("VLLM_RPC_BASE_PATH", os.path.relpath(tempfile.gettempdir()))  # noqa: ASYNC240  two short calls
        # Replace the value that vLLM for processors has set. A waiting engine core may fork its own processes, because it has no
        # threads when it starts them.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn" if self._waiting is None else "fork"
        self._config.load_config.model_loader_extra_config = self._snapshot.reference()
        self._context = context
        if self._waiting is not None:
            self._waiting.threads = threads
        # Start it in a thread, so that the event loop can still receive a request to end the worker.
        self._engine = await asyncio.to_thread(self._started)
        if self._ended:
            self.teardown()

    def _started(self) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  vLLM is no dependency

        forget_devices()
        with engine_core_in(self._waiting):
            return AsyncLLM.from_vllm_config(self._config, disable_log_stats=self._logs_no_stats)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Yield the pieces of the answers as they are made. The last piece of each answer says why it has ended.

        If the iterator is closed, vLLM aborts the request. Raise InputInvalid if the request does not fit the model, Overloaded if
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
        engine, self._engine, self._ended = self._engine, None, True
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
