"""What a worker asks torch about its devices. The tests set torch's answers, so they need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotError
from pilotflame.runtime.calls.worker import devices
from worker_process import WorkerProcess


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate two devices. The process has used the second one. Return the list of the devices that were waited for."""
    waited = list[int]()
    for name, found in {
        "is_initialized": lambda: True, "device_count": lambda: 2, "get_device_name": lambda: "H100",
        "memory_reserved": lambda number: 4096 * number, "synchronize": waited.append,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, found)
    return waited


def test_the_device_is_the_processor_unless_the_handler_uses_another(used: list[int]) -> None:
    assert devices.describe() == "cuda:H100"


def test_without_devices_none_has_failed() -> None:
    assert devices.describe() == "cpu"
    assert devices.failure(None) is None


def test_only_devices_that_were_used_are_waited_for(used: list[int]) -> None:
    assert devices.failure(None) is None
    assert used == [1]


def test_a_device_that_has_failed_is_found(used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("an illegal memory access was encountered")

    def fail(_number: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert devices.failure(None) is error


def test_the_causes_of_an_error_count() -> None:
    assert devices.may_be_of_device(RuntimeError("device-side assert triggered"))
    assert devices.may_be_of_device(SnapshotError("A copy failed."))
    wrapped = ValueError("no answer")
    wrapped.__cause__ = RuntimeError("device-side assert triggered")
    assert devices.may_be_of_device(wrapped)
    assert not devices.may_be_of_device(ValueError("n is missing"))
    # The search ends even if the chain of causes is a cycle.
    wrapped.__cause__ = wrapped
    assert not devices.may_be_of_device(wrapped)


# A handler whose rehearsal makes each later use of its device fail.
BREAKS_IN_REHEARSAL = """
import torch
def fail(number):
    raise RuntimeError("an illegal memory access was encountered")
for name, found in {
    "is_initialized": lambda: True, "device_count": lambda: 1, "memory_reserved": lambda number: 4096, "synchronize": fail,
}.items():
    setattr(torch.cuda, name, found)
def rehearse(context):
    raise RuntimeError("an illegal memory access was encountered")
def handler(event):
    return event
"""


def test_a_standby_whose_device_fails_in_the_rehearsal_ends(tmp_path: Path) -> None:
    process = WorkerProcess(tmp_path, BREAKS_IN_REHEARSAL)
    assert process.frame() is None
    assert process.exit_code() == 1
    assert "rehearse(context)" in process.errors()
    process.close()
