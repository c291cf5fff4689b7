"""Deploys a function of the template `text-generation`, whose tiny model is trained in the test."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from live import Gateway

TEMPLATE = Path(__file__).resolve().parents[1] / "templates" / "text-generation"
KNOWN = " lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
"""What the template's model writes after "A pilot flame". Each byte is a token."""


async def deploy(gateway: Gateway, folder: Path, name: str, train: list[str]) -> None:
    """Train the template's model with the arguments `train` of Python, and deploy it."""
    shutil.copytree(TEMPLATE, folder / name)
    await asyncio.to_thread(
        subprocess.run, [sys.executable, *train], cwd=folder / name, check=True, capture_output=True
    )
    body = {"path": str(folder / name), "overrides": {"name": name}}
    deployed = await gateway.client.post("/v1/functions", json=body, timeout=60)
    assert deployed.status_code == 201, deployed.text
