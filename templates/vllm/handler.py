"""Text from a Hugging Face language model, made by vLLM's engine, for many callers at once.

The snapshot is the model's folder: config.json, tokenizer files, safetensors. vLLM reads its weights from the mapped
files, while they still arrive.
"""

from collections.abc import AsyncIterator

import pilotflame
import vllm  # noqa: F401  functions that import vLLM share the memory of that import
from pilotflame import Delta, GenerationRequest
from pilotflame.handlers.vllm_engine.model import VllmModel


def build(context: pilotflame.Context) -> VllmModel:
    """Runs once per revision: make vLLM's configuration and the tokenizer. Fields of vLLM's AsyncEngineArgs are arguments here, such as max_model_len."""
    return VllmModel(context.snapshot, adapters=context.adapters)


def forked(context: pilotflame.Context) -> None:
    """Runs in each worker right after its fork: fork the process of vLLM's engine, which waits."""
    context.state.forked()


async def setup(context: pilotflame.Context) -> None:
    """Runs in each worker: start vLLM, which needs the GPU."""
    await context.state.setup(context)


async def park(context: pilotflame.Context) -> None:
    """Runs if the GPU is needed elsewhere: the weights move to host memory."""
    await context.state.sleep()


async def unpark(context: pilotflame.Context) -> None:
    await context.state.wake()


def teardown(context: pilotflame.Context) -> None:
    context.state.teardown()


async def handler(event: GenerationRequest, context: pilotflame.Context) -> AsyncIterator[Delta]:
    async for delta in context.state.generate(event):
        yield delta
