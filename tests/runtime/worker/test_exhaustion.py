"""What says that memory ran out: the real errors of the libraries, and what only looks like them."""

import pytest
import torch
from pilotflame.runtime.worker.exhaustion import exhausted


class Silent(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


def of_torch() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA ran full"),
        RuntimeError("CUDA error: out of memory"),
        of_torch(),
    ],
    ids=lambda error: str(error)[:20],
)
def test_memory_that_ran_out_is_known(error: BaseException) -> None:
    assert exhausted(error)


class OutOfMemoryError(Exception):
    """Somebody else's."""


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), ValueError("out of memory"), OutOfMemoryError(), Silent()]
)
def test_others_are_not(error: BaseException) -> None:
    assert not exhausted(error)
