"""Text from any Hugging Face causal language model, for many callers at once, piece by piece as it is made.

The snapshot is the model's folder: config.json, tokenizer files, safetensors. The weights lie on a GPU if there is one,
and are mapped otherwise. A prompt is read while weights still arrive, because each layer waits only for its own weights.
"""

from collections.abc import AsyncIterator

import pilotflame
from pilotflame import Delta, GenerationRequest


def build(context: pilotflame.Context):
    """Runs once per revision: make everything but the weights, which each worker maps or copies when it starts."""
    return pilotflame.language_model(context.snapshot, adapters=context.adapters, prefixes=context.prefixes)


def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    context.state.rehearse()


async def handler(event: GenerationRequest, context: pilotflame.Context) -> AsyncIterator[Delta]:
    async for delta in context.state.generate(event):
        yield delta
