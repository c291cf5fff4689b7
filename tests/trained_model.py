"""Deploys a function of the template `text-generation`, whose tiny model is trained in the test.

With ENGINE=vllm, the function is of the template `vllm`, with the same model, in a gateway in the environment of the real vLLM.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import vllm_environment
from live import Gateway, gateway_here, gateway_process

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
TEMPLATE = TEMPLATES / "text-generation"
ENGINE = os.environ.get("PILOTFLAME_TEST_ENGINE", "own")
# vLLM's kernels for processors have no heads of 16.
HEADS = (
    "num_attention_heads=4,\n            num_key_value_heads=2",
    "num_attention_heads=1, num_key_value_heads=1",
)
KNOWN = " lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
"""What the template's model writes after "A pilot flame". Each byte is a token."""


async def deploy(gateway: Gateway, folder: Path, name: str, train: list[str]) -> None:
    """Train the template's model with the arguments `train` of Python, and deploy it."""
    shutil.copytree(TEMPLATE, folder / name)
    overrides: dict[str, Any] = {"name": name}
    if ENGINE == "vllm":
        overrides |= {"snapshot": str(folder / name / "weights"), "concurrency": 256, "build_timeout_s": 600}
        source = folder / name / "make_weights.py"
        assert HEADS[0] in source.read_text()
        source.write_text(source.read_text().replace(*HEADS))
        handler = (TEMPLATES / "vllm" / "handler.py").read_text()
        given = "adapters=context.adapters"
        assert given in handler
        handler = handler.replace(
            given, f"{given}, dtype='float32', enforce_eager=True, kv_cache_memory_bytes=64 << 20"
        )
        (folder / name / "handler.py").write_text(handler)
        (folder / name / "requirements.txt").unlink()
    await asyncio.to_thread(
        subprocess.run, [sys.executable, *train], cwd=folder / name, check=True, capture_output=True
    )
    body = {"path": str(folder / name), "overrides": overrides}
    deployed = await gateway.client.post("/v1/functions", json=body, timeout=300)
    assert deployed.status_code == 201, deployed.text


@asynccontextmanager
async def gateway_of_engine(state: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway for the functions of `deploy`."""
    if ENGINE == "vllm":
        python = str(vllm_environment.python_of_cache())
        async with gateway_process(state, python=python, **settings) as gateway:
            yield gateway
    else:
        async with gateway_here(state, **settings) as gateway:
            yield gateway
