"""A language model in this process: what the engine gets for a request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from pilotflame.handlers.caller import CallOrigin, origin
from pilotflame.handlers.language_model.admission import NO_TARGETS
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.engine_steps import Token
from pilotflame.handlers.language_model.model import LanguageModel
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot

from .test_declared_prefixes import write_model


async def test_the_first_of_several_answers_decides_whether_a_request_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    snapshot = Snapshot(tmp_path, create(tmp_path))
    model = LanguageModel(snapshot, rows=2, window=500)
    snapshot.open()
    targets: list[Any] = []
    others = set[tuple[int, str]]()
    generate = Engine.generate

    def noted(self: Engine, *arguments: Any) -> AsyncGenerator[Token]:
        targets.append(arguments[5])
        others.add((arguments[4], arguments[7]))
        return generate(self, *arguments)

    monkeypatch.setattr(Engine, "generate", noted)
    request = GenerationRequest(prompt="Go", n=3, max_tokens=4, first_token_by=time.time() + 60, token_ms=6e4)
    origin.set(CallOrigin("a1", 1))
    ended = {delta.index async for delta in model.generate(request) if delta.finish_reason}
    assert ended == {0, 1, 2}
    assert [one != NO_TARGETS for one in targets] == [True, False, False]
    # The tenant and the priority of the call reach each of its sequences.
    assert others == {(-10, "a1")}
