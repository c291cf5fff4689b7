"""Linear layers with 16-bit weights on a processor that multiplies only wider numbers fast.

On such a processor, torch's own product takes as long for each further token as for the first one. `WidenedLinear` converts the weights
to float32 slice by slice, and BLAS multiplies each slice with all tokens while it is still in the processor's cache. No copy of the
weights stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST_TOKENS = 4
"""From this number of tokens on, a WidenedLinear takes less time than torch's own product."""
SLICE = 1 << 19
"""How many weights a slice has. As float32, they have 2 MiB."""


def _slow() -> frozenset[torch.dtype]:
    """Return the types for which oneDNN has no fast product on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset({torch.bfloat16, torch.float16})
    supports = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,  # noqa: SLF001
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,  # noqa: SLF001
    }
    return frozenset(dtype for dtype, supported in supports.items() if not supported())


SLOW = _slow()


class WidenedLinear(nn.Linear):
    """A layer that computes in float32 if this is faster. `widen` makes it from a plain one."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight, bias = self.weight, self.bias
        outputs, inputs = weight.shape
        # Otherwise use torch's product: a weight of another class may be quantised, and a compiler makes code of its own.
        if (
            weight.dtype not in SLOW
            or input.dtype != weight.dtype
            or input.numel() < LEAST_TOKENS * inputs
            or weight.device.type != "cpu"
            or type(weight) is not nn.Parameter
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
        ):
            return super().forward(input)
        # Use the tokens as columns, because BLAS is faster with few columns than with few rows.
        columns = input.reshape(-1, inputs).float().t()
        found = columns.new_empty(outputs, columns.shape[1])
        step = max(1, SLICE // inputs)
        parts = torch.split(weight, step), torch.split(found, step)
        for part, out in zip(*parts, strict=True):
            torch.mm(part.float(), columns, out=out)
        if bias is not None:
            found += bias[:, None]
        # Make the result contiguous, because attention needs the numbers of a token side by side.
        made = found.t().to(input.dtype, memory_format=torch.contiguous_format)
        return made.view(*input.shape[:-1], outputs)


def widen(module: nn.Module) -> None:
    """Let the linear layers of a module compute in float32 where this is faster."""
    for layer in module.modules() if SLOW else ():
        if type(layer) is nn.Linear:
            layer.__class__ = WidenedLinear
