"""Takes apart tensors that consist of inner tensors, such as torchao's quantised weights, and rebuilds them.

Such a tensor belongs to a subclass with `__tensor_flatten__` and `__tensor_unflatten__`, torch's protocol for inner
tensors. It has no bytes of its own. Its attributes are inner tensors with the bytes: the packed integers, the scales.
In a file, each inner tensor has a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
"""The types of tensors that only have bytes of their own, and no inner tensors."""


def inner_tensors(tensor: Tensor) -> dict[str, Tensor] | None:
    """Return the inner tensors of `tensor`, by the path of their attribute. None if `tensor` has no inner tensors.

    If an inner tensor has inner tensors itself, a path has several attributes, separated by dots.
    """
    kind: Any = type(tensor)
    if kind in PLAIN or not hasattr(kind, "__tensor_flatten__"):
        return None
    found: dict[str, Tensor] = {}
    for attribute in kind.__tensor_flatten__(tensor)[0]:
        held: Tensor = getattr(tensor, attribute)
        inner = inner_tensors(held)
        found |= (
            {attribute: held}
            if inner is None
            else {f"{attribute}.{path}": one for path, one in inner.items()}
        )
    return found


def inner_names(name: str, path: str) -> tuple[str, str]:
    """Return the names that a file may have for an inner tensor of `name`: `0.weight.scale` or `0._weight_scale`.

    torchao writes the second name. transformers and vLLM read it too.
    """
    owner, _, attribute = name.rpartition(".")
    return f"{name}.{path}", f"{owner}._{attribute}_{path}".removeprefix(".")


def rebuild(tensor: Tensor, inner: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor like `tensor` that consists of `inner`. Copy the attributes that were added to `tensor`."""
    made = _made(tensor, inner, "")
    if isinstance(tensor, nn.Parameter) and not isinstance(made, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    for attribute, value in vars(tensor).items():
        vars(made).setdefault(attribute, value)
    return made


def _made(tensor: Tensor, inner: Mapping[str, Tensor], path: str) -> Tensor:
    if inner_tensors(tensor) is None:
        return inner[path.removesuffix(".")]
    kind: Any = type(tensor)
    attributes, context = kind.__tensor_flatten__(tensor)
    held = {one: _made(getattr(tensor, one), inner, f"{path}{one}.") for one in attributes}
    made: Tensor = kind.__tensor_unflatten__(held, context, tensor.size(), tensor.stride())
    return made


def tensors_with_bytes(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose bytes an operation on `tensor` may read: `tensor` itself, or its inner tensors."""
    if type(tensor) in PLAIN:
        yield tensor
        return
    inner = inner_tensors(tensor)
    if inner is not None:
        yield from inner.values()
        return
    # Yield the attributes of `tensor` too, because an older subclass without the protocol may have inner tensors there.
    yield tensor
    yield from (value for value in vars(tensor).values() if type(value) in PLAIN)
