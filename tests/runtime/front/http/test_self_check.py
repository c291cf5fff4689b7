"""The check at start: another aiohttp may lack names, raise, stay silent, or serve without the fast path."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pilotflame.runtime.front.http import self_check
from pilotflame.runtime.front.http.connection import FastConnection
from pilotflame.runtime.front.http.self_check import why_not_fast


async def test_the_installed_aiohttp_serves_the_fast_path() -> None:
    assert await why_not_fast() == ""
    # Nothing is left of the requests that were tried.
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("name", "instead", "reason"),
    [
        ("_enter_fast_path", lambda _self, _waiter: False, "got ['slow 0', 'slow 1', 'slow 2', 'slow 3']"),
        ("_send", lambda _self, _response: None, "TimeoutError"),
        ("data_received", lambda self, _data: self.transport.abort(), "IncompleteReadError"),
    ],
)
async def test_an_aiohttp_that_behaves_otherwise_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, instead: Any, reason: str
) -> None:
    monkeypatch.setattr(self_check, "LIMIT_S", 0.2)
    monkeypatch.setattr(FastConnection, name, instead)
    assert reason in await why_not_fast()
