"""A pass in slices stops between two layers, and passes of other threads do not."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from pilotflame.handlers.language_model.pass_slices import PassSlices
from torch import Tensor, nn


class Layers(nn.Module):
    """Adds one in each layer, and records which layers have run."""

    def __init__(self, count: int, fails_at: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(self, number, fails=number == fails_at) for number in range(count))
        self.ran: list[int] = []

    def forward(self, given: Tensor) -> Tensor:
        for layer in self.layers:
            given = layer(given)
        return given


class Layer(nn.Module):
    def __init__(self, of: Layers, number: int, *, fails: bool) -> None:
        super().__init__()
        self._of, self._number, self._fails = [of], number, fails

    def forward(self, given: Tensor) -> Tensor:
        if self._fails:
            raise ValueError("a layer that fails")
        self._of[0].ran.append(self._number)
        return given + 1


def sliced(count: int, fails_at: int = -1) -> tuple[Layers, PassSlices]:
    module = Layers(count, fails_at)
    return module, PassSlices([*module.layers], lambda: None)


def test_without_time_each_slice_is_one_layer() -> None:
    module, slices = sliced(4)
    found = slices.begin(lambda: module(torch.zeros(1)), 0.0)
    ran = [len(module.ran)]
    while found is None:
        assert slices.paused
        found = slices.advance(0.0)
        ran.append(len(module.ran))
    assert ran == [0, 1, 2, 3, 4]
    assert found.tolist() == [4.0]
    assert not slices.paused


def test_with_time_a_pass_is_one_slice() -> None:
    module, slices = sliced(4)
    found = slices.begin(lambda: module(torch.zeros(1)), math.inf)
    assert found is not None
    assert found.tolist() == [4.0]


def test_other_passes_run_while_one_waits() -> None:
    module, slices = sliced(3)
    assert slices.begin(lambda: module(torch.zeros(1)), 0.0) is None
    assert module(torch.ones(1)).tolist() == [4.0]
    assert slices.paused
    found = slices.advance(math.inf)
    assert found is not None
    assert found.tolist() == [3.0]


def test_a_pass_that_is_stopped_runs_no_further_layer_and_the_next_one_runs() -> None:
    module, slices = sliced(3)
    slices.stop()
    assert slices.begin(lambda: module(torch.zeros(1)), 0.0) is None
    assert slices.advance(0.0) is None
    slices.stop()
    assert module.ran == [0]
    found = slices.begin(lambda: module(torch.ones(1)), math.inf)
    assert found is not None
    assert found.tolist() == [4.0]


def test_a_pass_that_has_ended_holds_nothing() -> None:
    module, slices = sliced(2)
    given, freed = torch.zeros(1), threading.Event()
    weakref.finalize(given, freed.set)
    slices.begin(partial(module, given), math.inf)
    del given
    assert freed.wait(10)


def test_a_pass_that_would_end_the_process_is_an_error() -> None:
    module, slices = sliced(2)
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        slices.begin(lambda: sys.exit(3), math.inf)
    assert slices.begin(lambda: module(torch.zeros(1)), math.inf) is not None


def test_the_device_is_waited_for_before_each_look_at_the_clock() -> None:
    module, waits = Layers(3), list[int]()
    slices = PassSlices([*module.layers], lambda: waits.append(len(module.ran)))
    slices.begin(lambda: module(torch.zeros(1)), math.inf)
    assert waits == [0, 1, 2]


def test_what_a_pass_raises_is_raised_by_its_slice() -> None:
    module, slices = sliced(3, fails_at=1)
    assert slices.begin(lambda: module(torch.zeros(1)), 0.0) is None
    assert slices.advance(0.0) is None
    with pytest.raises(ValueError, match="a layer that fails"):
        slices.advance(math.inf)
    assert not slices.paused
