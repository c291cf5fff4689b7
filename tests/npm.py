"""Packages of npm, and programs of Node that use them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest


def install(folder: Path, *packages: str) -> None:
    """Install packages into a folder. Skip the test without Node and npm, or if npm cannot download them."""
    if shutil.which("node") is None or (npm := shutil.which("npm")) is None:
        pytest.skip("Node and npm are not installed")
    options = ["--silent", "--no-audit", "--no-fund", "--omit=optional", "--ignore-scripts"]
    command = [npm, "install", *options, *packages]
    if subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip(f"npm cannot download {' '.join(packages)}")


async def finished(*command: str, cwd: Path) -> str:
    """Run a program to its end, and return what it has printed."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, (out + err).decode()
    return out.decode()
