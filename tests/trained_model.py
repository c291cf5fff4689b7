"""Deploys a function of the template `text-generation`, whose tiny model is trained once for all tests that need the same model.

With PILOTFLAME_TEST_ENGINE=vllm, the function is of the template `vllm`, with the same model, and its gateway
runs in the environment of the real vLLM.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm_environment
from live import Gateway, gateway_here, gateway_process
from pilotflame.runtime.node.packaging.code import pack
from round_robin import SeveralGateways

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
TEMPLATE = TEMPLATES / "text-generation"
ENGINE = os.environ.get("PILOTFLAME_TEST_ENGINE", "own")
# A text in make_weights.py and its replacement: vLLM's kernels for processors do not support heads of size
# 16.
HEADS = (
    "num_attention_heads=4,\n            num_key_value_heads=2",
    "num_attention_heads=1, num_key_value_heads=1",
)
KNOWN = " lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
"""What the template's model writes after "A pilot flame". Each byte is a token."""
# Keep the weights in pytest's cache, so that a clean clone trains each model anew.
TRAINED = Path(__file__).resolve().parents[1] / ".pytest_cache" / "d" / "trained-models"
LIBRARIES = ("torch", "transformers", "tokenizers")


def train(folder: Path, arguments: list[str]) -> None:
    """Run Python with these arguments, which writes weights/ into a copy of the template. If the same
    training has run before, copy its weights instead.
    """
    said = [(folder / "make_weights.py").read_text(), *arguments, sys.version, *map(version, LIBRARIES)]
    kept = TRAINED / hashlib.sha256(repr(said).encode()).hexdigest()
    TRAINED.mkdir(parents=True, exist_ok=True)
    # Another process of pytest may train the same model now.
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=TRAINED) as made:
                shutil.copy(folder / "make_weights.py", made)
                subprocess.run([sys.executable, *arguments], cwd=made, check=True, capture_output=True)
                (Path(made) / "weights").rename(kept)
    shutil.copytree(kept, folder / "weights")


async def deploy(gateway: Gateway, folder: Path, name: str, arguments: list[str]) -> None:
    """Train the template's model by Python with these arguments, and deploy it."""
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
    await asyncio.to_thread(train, folder / name, arguments)
    how: dict[str, Any] = {"json": {"path": str(folder / name), "overrides": overrides}}
    if isinstance(gateway, SeveralGateways):
        # Send the files of the folder. Weights at a path would be on this machine only.
        content = await asyncio.to_thread(pack, folder / name)
        how = {
            "content": content,
            "headers": {"Content-Type": "application/gzip"},
            "params": {"set": f"name={name}"},
        }
    deployed = await gateway.client.post("/v1/functions", **how, timeout=300)
    assert deployed.status_code == 201, deployed.text


@asynccontextmanager
async def gateway_of_engine(state: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway for the functions of `deploy`."""
    if ENGINE == "vllm":
        python = str(vllm_environment.python_of_cache())
        async with gateway_process(state, python=python, **settings) as gateway:
            yield gateway
    else:
        async with gateway_here(state, **settings) as gateway:
            yield gateway
