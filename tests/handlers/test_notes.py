"""The notes that a function makes while it is built are warnings in its status, also after a restart of the gateway."""

from __future__ import annotations

from pathlib import Path

from live import gateway_here

HANDLER = """
from pilotflame.handlers.notes import note

def build(context):
    note("It answers one request at a time.")

def handler(event):
    return event
"""


async def test_notes_of_build_are_warnings(state: Path) -> None:
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(HANDLER, {"name": "noted"})
        assert (await function.status())["warnings"] == ["It answers one request at a time."]
        name = function.name
    async with gateway_here(state) as gateway:
        assert (await gateway.function(name).status())["warnings"] == ["It answers one request at a time."]
