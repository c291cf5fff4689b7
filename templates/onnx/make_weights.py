"""Train a module, export it to ONNX, and split it: model.onnx has the graph, weights/model.safetensors the weights.

Run it once: python make_weights.py. It needs onnx and onnxscript.
"""

import json
import math
from pathlib import Path

import onnx
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn.functional import mse_loss

STEPS = 1000
FILE = "model.safetensors"
# ONNX Runtime needs the values of small tensors, such as shapes, in the graph.
LEAST_BYTES = 1024


def train() -> nn.Module:
    """Return a small network that has learned sin(x) for x from -3.14 to 3.14."""
    torch.manual_seed(0)
    # More threads would slow down a module this small.
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x = torch.linspace(-math.pi, math.pi, 256).unsqueeze(1)
    y = torch.sin(x)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def export(model: nn.Module, width: int) -> onnx.ModelProto:
    """Export a module that takes and returns one tensor of shape [batch, width]."""
    program = torch.onnx.export(
        model, (torch.zeros(2, width),), dynamo=True, verbose=False, input_names=["x"], output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    return program.model_proto


def split(model: onnx.ModelProto, folder: Path) -> None:
    """Write the weights of any ONNX model to weights/model.safetensors, and the graph to model.onnx."""
    arrays = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    large = {name: array for name, array in arrays.items() if array.nbytes >= LEAST_BYTES}
    path = folder / "weights" / FILE
    path.parent.mkdir(exist_ok=True)
    save_file(large, path)
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for one in model.graph.initializer:
        if one.name in large:
            begin, end = (8 + size + offset for offset in header[one.name]["data_offsets"])
            _refer(one, begin, end)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def _refer(tensor: onnx.TensorProto, begin: int, end: int) -> None:
    """Replace the values of a tensor by a reference to bytes of the safetensors file."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", FILE), ("offset", str(begin)), ("length", str(end - begin))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


if __name__ == "__main__":
    here = Path(__file__).parent
    split(export(train(), 1), here)
    print(f"wrote {here / 'model.onnx'} and {here / 'weights' / FILE}")
