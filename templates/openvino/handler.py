"""A model in OpenVINO on the CPU, called in batches.

The graph is model.xml, and its weights are in the snapshot, as one tensor of bytes. `make_weights.py` writes both, and shows
how to do it for a model of your own.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pilotflame
from pydantic import BaseModel, Field

GRAPH = Path(__file__).with_name("model.xml")


class Event(BaseModel):
    x: Annotated[float, Field(ge=-3.15, le=3.15)]


def build(context: pilotflame.Context) -> str:
    """Runs once per revision: read the graph."""
    return GRAPH.read_text()


def setup(context: pilotflame.Context) -> Any:
    """Runs in each worker: compile the graph, whose constants are views of the snapshot's files."""
    # The import starts a thread, which a fork would not survive, so it is not at the top.
    import openvino

    context.snapshot.wait()
    weights = context.snapshot.load("weights")["weights"].numpy()
    core = openvino.Core()
    graph = core.read_model(context.state, openvino.Tensor(weights, shared_memory=True))
    # One stream: a batch at a time, on all processors of the worker. Floats stay floats, also where bfloat16 is faster.
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    model = core.compile_model(graph, "CPU", hints)
    # The first run allocates the buffers.
    model(np.zeros((1, model.input(0).partial_shape[1].get_length()), np.float32))
    # The constants view the array, which must live as long.
    return model, weights


@pilotflame.batch(max_size=256, example={"x": 1.0})
def handler(events: list[Event], context: pilotflame.Context) -> list[dict[str, float]]:
    model, _ = context.state
    outputs = model(np.array([[event.x] for event in events], np.float32))[0]
    return [{"y": float(y)} for y in outputs[:, 0]]
