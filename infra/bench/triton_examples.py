"""Runs the published examples of Triton's Python clients, unchanged, against a gateway with the models that they name.

    python infra/bench/triton_examples.py FOLDER

FOLDER is src/python/examples of the repository triton-inference-server/client. The script prints the outcome of each
example, and why each excluded example cannot run. It needs the packages of the extra `test`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from control import Control, gateway
from servers import HERE, free_port

MODELS = HERE / "functions" / "triton"
LIMIT_S = 60
MEMORY = "The shared-memory extensions are not offered: a caller could name any segment."
SEQUENCES = "Sequences, whose requests share a state in the server, are not offered."
OTHER_MODEL = "It needs a model of images, an ensemble or weights that are not published with it."
EXCLUDED = {
    "ensemble_image_client": OTHER_MODEL, "grpc_image_client": OTHER_MODEL, "image_client": OTHER_MODEL,
    "grpc_client": OTHER_MODEL, "memory_growth_test": OTHER_MODEL,
    "reuse_infer_objects_client": MEMORY, "simple_grpc_cudashm_client": MEMORY, "simple_grpc_shm_client": MEMORY,
    "simple_grpc_shm_string_client": MEMORY, "simple_http_cudashm_client": MEMORY, "simple_http_shm_client": MEMORY,
    "simple_http_shm_string_client": MEMORY,
    "simple_grpc_aio_sequence_stream_infer_client": SEQUENCES, "simple_grpc_sequence_stream_infer_client": SEQUENCES,
    "simple_grpc_sequence_sync_infer_client": SEQUENCES, "simple_http_sequence_sync_infer_client": SEQUENCES,
}  # fmt: skip
"""By the name of an example: why it cannot run."""
MODEL_COUNTS = {"simple_http_model_control": 7, "simple_grpc_model_control": 8}
"""The examples that count the models, in the order of these counts. They run last, and unload the model `simple`."""


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="src/python/examples of Triton's clients")
    folder = made.parse_args().folder
    examples = sorted(path for path in folder.glob("*.py") if path.stem not in EXCLUDED)
    if not examples:
        print(f"{folder} has no examples.", file=sys.stderr)
        return 2
    for name, reason in EXCLUDED.items():
        print(f"excluded  {name}: {reason}")
    examples.sort(key=lambda path: MODEL_COUNTS.get(path.stem, 0))
    with served() as (http, grpc, control):
        failed = []
        for example in examples:
            have_models(control, MODEL_COUNTS.get(example.stem, 0))
            if not passes(example, grpc if "grpc" in example.stem else http):
                failed.append(example)
    print(f"{len(examples) - len(failed)} of {len(examples)} examples passed; {len(EXCLUDED)} excluded.")
    return 1 if failed else 0


@contextmanager
def served() -> Iterator[tuple[str, str, Control]]:
    """Run a gateway with the models during the block. Return the addresses of its HTTP and its gRPC port."""
    grpc = f"127.0.0.1:{free_port()}"
    with gateway({"PILOTFLAME_PLUGIN_PORTS": f"oip={grpc}"}) as (server, control):
        for model in sorted(MODELS.iterdir()):
            control.deploy(str(model), name=model.name.replace("_", "-"))
        control.deploy(str(MODELS / "simple"), name="simple-int8", **{"env.DATATYPE": "INT8"})
        yield server.url.removeprefix("http://"), grpc, control


def have_models(control: Control, count: int) -> None:
    """Deploy copies of `simple_identity` until the gateway has `count` models."""
    there = len(control.request("POST", "/v2/repository/index"))
    for number in range(there, count):
        control.deploy(str(MODELS / "simple_identity"), name=f"identity-{number}")


def passes(example: Path, address: str) -> bool:
    """Run an example, and print its outcome."""
    command = [sys.executable, "-P", str(example), "-u", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(f"{'passed' if done.returncode == 0 else 'FAILED':9} {example.stem}", flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
