"""An ONNX model in ONNX Runtime on the CPU, called in batches. Its weights stay mapped, one copy for all workers.

The graph is model.onnx, and its large weights are in the snapshot. `make_weights.py` writes both, and shows how to split a
model of your own.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pilotflame
from pydantic import BaseModel, Field

GRAPH = Path(__file__).with_name("model.onnx")
# True: each worker makes a private copy of the weights in the order that the kernels like. It needs more memory and a longer
# start, and runs faster.
PREPACK = False


class Event(BaseModel):
    x: Annotated[float, Field(ge=-3.15, le=3.15)]


def build(context: pilotflame.Context) -> bytes:
    """Runs once per revision: read the graph."""
    return GRAPH.read_bytes()


def setup(context: pilotflame.Context) -> Any:
    """Runs in each worker: make the session, whose weights are views of the snapshot's files."""
    # A session starts threads, which a fork would not survive, so it is not made in `build`.
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", str(int(not PREPACK)))
    # Without it, the threads of an idle worker burn processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    folder = str(context.snapshot.files)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    # ONNX Runtime reads the file itself, so all of it must be there.
    context.snapshot.wait()
    session = onnxruntime.InferenceSession(context.state, options, providers=["CPUExecutionProvider"])
    # The first run allocates the buffers.
    session.run(None, {"x": np.zeros((1, session.get_inputs()[0].shape[1]), np.float32)})
    return session


@pilotflame.batch(max_size=256, example={"x": 1.0})
def handler(events: list[Event], context: pilotflame.Context) -> list[dict[str, float]]:
    inputs = np.array([[event.x] for event in events], np.float32)
    (outputs,) = context.state.run(None, {"x": inputs})
    return [{"y": float(y)} for y in outputs[:, 0]]
