"""`pilotflame explain`: a line for each decision, and JSON for programs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from live import gateway_process
from pilotflame.runtime.command.commands.explain import _in_words


async def test_decisions_are_printed_in_words_and_as_json(state: Path, run: Any) -> None:
    async with gateway_process(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event\n", name="told", check=False)

        def explain(*arguments: object) -> Any:
            return run("explain", "told", *arguments, "--url", gateway.url)

        nothing = await asyncio.to_thread(explain, "--since", "1h")
        assert (nothing.returncode, nothing.stdout) == (0, "")
        assert "nothing was decided about told since then" in nothing.stderr
        await function.answer(1)
        lines = (await asyncio.to_thread(explain)).stdout.splitlines()
        assert lines[0][2] == lines[0][5] == ":"
        assert lines[0][10:].startswith("started 1 worker: 1 invocation waited, 0 workers ready")
        rows = [json.loads(line) for line in (await asyncio.to_thread(explain, "--json")).stdout.splitlines()]
        assert [row["text"] for row in rows] == [line[10:] for line in lines]
        assert rows[0]["figures"]["queued"] == 1
        assert (await asyncio.to_thread(explain, "-n", 1)).stdout.splitlines() == lines[-1:]
        missing = await asyncio.to_thread(run, "explain", "never", "--url", gateway.url)
        assert missing.returncode == 1
        assert "never" in missing.stderr


def test_causes_that_are_no_settings_have_words() -> None:
    reasons = (
        "load wants 2",
        "plan lets 1 stay for 30 s",
        "window lets 3 stay for 41 s",
        "max_workers (4) refuses 1",
    )
    assert [_in_words(reason) for reason in reasons] == [
        "the load wants 2", "the keep-alive policy lets 1 stay for 30 s",
        "the recent load (window) lets 3 stay for 41 s", "max_workers (4) refuses 1",
    ]  # fmt: skip
