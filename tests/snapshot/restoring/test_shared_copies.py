"""Copies of weights that the forks of a process share: filled once, sealed, and private where a fork writes."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import RestorePlan, make_plan, restore
from pilotflame.snapshot.restoring.shared_copies import SharedCopies
from safetensors.torch import save_file
from shared_memory import copies_kb
from torch import nn

FORKS = multiprocessing.get_context("fork")
WIDTH = 512


def work(plan: RestorePlan, folder: Path, sent: Connection, *, writes: bool) -> None:
    torch.set_num_threads(1)
    restore(plan, Mapping(folder, plan.manifest))
    total = sum(float(parameter.detach().double().sum()) for parameter in plan.module.parameters())
    own_kb = copies_kb(os.getpid())
    if writes:
        with torch.no_grad():
            plan.module.weight.zero_()
    sent.send((total, own_kb, copies_kb(os.getpid())))
    sent.close()
    os._exit(0)


def forked(plan: RestorePlan, folder: Path, *, writes: bool = False) -> tuple[float, int, int]:
    received, sent = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=work, args=(plan, folder, sent), kwargs={"writes": writes})
    process.start()
    assert received.poll(30)
    found: tuple[float, int, int] = received.recv()
    process.join(10)
    return found


def test_weights_of_another_type_are_converted_once_for_all_forks(tmp_path: Path) -> None:
    stored = nn.Linear(WIDTH, WIDTH).to(torch.float16)
    save_file(stored.state_dict(), tmp_path / "model.safetensors")
    manifest = create(tmp_path)
    with torch.device("meta"):
        module = nn.Linear(WIDTH, WIDTH)
    plan = make_plan(module, manifest, cast=True)
    wanted = sum(float(parameter.detach().double().sum()) for parameter in stored.parameters())
    total, read_kb, written_kb = forked(plan, tmp_path, writes=True)
    assert (total, read_kb) == (wanted, 0)
    assert written_kb >= WIDTH * WIDTH * 4 // 1024
    # The file has only zeros now, so a second conversion would give another sum.
    (tmp_path / "model.safetensors").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert forked(plan, tmp_path) == (wanted, 0, 0)


def test_memory_whose_fill_failed_is_filled_by_the_next() -> None:
    copies = SharedCopies([5, 0, 8])
    assert copies.offsets == [0, 64, 64]

    def fail(memory: torch.Tensor) -> None:
        memory.fill_(1)
        raise ValueError

    def fill(memory: torch.Tensor) -> None:
        memory[64:72] = 7

    with pytest.raises(ValueError, match=r"^$"):
        copies.mapped(fail)
    storages = [copies.mapped(fill), copies.mapped(fail)]
    for storage in storages:
        assert bytes(storage[64:72]) == b"\7" * 8
    storages[0][64] = 3
    assert storages[1][64] == 7
