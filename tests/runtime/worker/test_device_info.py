"""The traits of a worker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pilotflame.runtime.worker.worker import device_info


def test_a_device_that_no_handler_set_up_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_info.device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    assert device_info.device() == "cuda:H100"


@pytest.mark.parametrize(("dtypes", "found"), [([], ""), (["F32", "BF16", "BF16"], "BF16")])
def test_the_type_is_that_of_most_tensors(dtypes: list[str], found: str) -> None:
    tensors = [SimpleNamespace(dtype=dtype) for dtype in dtypes]
    snapshot: Any = SimpleNamespace(manifest=SimpleNamespace(tensors=tensors), path=Path())
    assert device_info.dtype(snapshot) == found
    assert device_info.dtype(None) == ""
