"""Fresh processes that serve a language model without pilotflame, and how long they take to the first token."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from servers import free_port, running

PROMPT = " ".join(f"w{number}" for number in range(1, 17))
# The script of a user who has no ready-made server.
_PLAIN = """
import http.server, json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, port = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = tokenizer(asked["prompt"], return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=asked["max_tokens"], do_sample=False)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(made[0].tolist()).encode())
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def plain_ms(folder: Path) -> float:
    """Return the milliseconds from the start of a script with `generate` to its answer of one token."""
    port = free_port()
    return _first_ms("plain", [sys.executable, "-c", _PLAIN, str(folder), str(port)], port, folder)


def transformers_serve_ms(folder: Path) -> float:
    """Return the milliseconds from the start of `transformers serve` to its answer of one token."""
    port = free_port()
    program = str(Path(sys.executable).with_name("transformers"))
    return _first_ms("transformers-serve", [program, "serve", str(folder), "--port", str(port)], port, folder)


def _first_ms(name: str, command: list[str], port: int, folder: Path) -> float:
    asked = {"model": str(folder), "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    began_s = time.perf_counter()
    with running(name, command, {"HF_HUB_OFFLINE": "1"}) as server:
        server.wait_answer(f"http://127.0.0.1:{port}", "/v1/completions", json.dumps(asked).encode())
        return (time.perf_counter() - began_s) * 1e3
