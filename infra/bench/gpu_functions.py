"""Functions with their weights on a device, in a real gateway: from zero, parked and woken, and two that take turns.

`gpu.py` runs it. The caller's time stands beside what the copy of the weights takes at the ceiling of the bus.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoint import Shape
from control import Control, Reply
from percentiles import median
from report import Report
from servers import start_pilotflame

_HERE = Path(__file__).resolve().parent
_WARM = 3
_TURNS = 100
_SIMULATED_MB = 81_920
_CONTEXT_MB = 2048
"""For the context and for what the forward pass needs."""
TOKEN = 7
Speed = Callable[[str, float, str, str], None]
_HANDLER = """
import checkpoint
import torch
from llama import skeleton

SHAPE = checkpoint.Shape(**{shape!r})

def build(context):
    with context.snapshot.skeleton():
        model = skeleton(SHAPE)
    context.snapshot.restore(model, device={device!r})
    return model

def rehearse(context):
    handler({{"token": 1}}, context)

@torch.inference_mode()
def handler(event, context):
    tokens = torch.tensor([[event["token"]]], device=context.state.lm_head.weight.device)
    return {{"token": int(context.state(tokens)[0, -1].argmax())}}
"""


@dataclass(frozen=True)
class Model:
    """A llama whose weights lie in `folder`. `right` is its answer, `copy_ms` what a copy at the ceiling takes."""

    folder: Path
    shape: Shape
    size_bytes: int
    right: int
    copy_ms: float


class GpuFunctions:
    """Measures functions of one model on one device."""

    def __init__(self, report: Report, speed: Speed, model: Model, rounds: int, *, cuda: bool) -> None:
        """`speed` enters a figure that says nothing where the device is simulated."""
        self._report, self._speed, self._model, self._rounds, self._cuda = report, speed, model, rounds, cuda
        total = torch.cuda.get_device_properties(0).total_memory if cuda else _SIMULATED_MB << 20
        self._total_mb = total >> 20

    def from_zero(self) -> None:
        """Enters cold_8b_extra_ms, and a row with the phases of each cold start. A standby has made the context."""
        cold = list[Reply]()
        with self._deployed({"cold": self._needed_mb}, {"scale.idle_timeout_s": 0.4}) as control:
            for number in range(self._rounds + 1):
                control.wait_for("cold", workers=0, standby=True)
                cold.append(self._call(control, "cold", cold=True))
                warm_ms = median([self._call(control, "cold").ms for _ in range(_WARM)])
                self._report.row(
                    part="function from zero", round=number, copy_ms=self._model.copy_ms, warm_ms=warm_ms,
                    cold_ms=cold[-1].ms, **cold[-1].phases_ms,
                )  # fmt: skip
        extra_ms = median([reply.ms for reply in cold[1:]]) - self._model.copy_ms
        self._speed("cold_8b_extra_ms", extra_ms, "ms beyond the copy", "<= 150")

    def parked(self) -> None:
        """Enters wake_function_extra_ms: the first call of a parked worker."""
        wake_ms = list[float]()
        settings = {"scale.idle_timeout_s": 1000, "scale.park_after_s": 0.2}
        with self._deployed({"parks": self._needed_mb}, settings) as control:
            self._call(control, "parks", cold=True)
            for _ in range(10 * self._rounds):
                parked = control.wait_for("parks", workers=0)["workers"]["parked"]
                if parked != 1:
                    raise RuntimeError(f"{parked} workers are parked, not 1")
                wake_ms.append(self._call(control, "parks").ms)
        extra_ms = median(wake_ms) - self._model.copy_ms
        self._speed("wake_function_extra_ms", extra_ms, "ms beyond the copy", "<= 100")

    def in_turns(self) -> None:
        """Enters alternations: calls of two functions in turn that do not fit together. Each is answered."""
        settings = {"scale.idle_timeout_s": 1000, "scale.max": 1}
        memory_mb = int(0.6 * self._total_mb)
        with self._filled(), self._deployed({"one": memory_mb, "two": memory_mb}, settings) as control:
            took_ms = [self._call(control, ("one", "two")[turn % 2]).ms for turn in range(_TURNS)]
        self._report.row(part="two functions in turns", turn_ms=median(took_ms), copy_ms=self._model.copy_ms)
        self._report.add("alternations", len(took_ms), "turns without an error")

    @property
    def _needed_mb(self) -> int:
        return int(1.1 * self._model.size_bytes / (1 << 20)) + _CONTEXT_MB

    @contextmanager
    def _deployed(self, memory_mb: dict[str, int], settings: Mapping[str, float]) -> Iterator[Control]:
        """A gateway with a function for each name, which may use so much of the device."""
        gpus = None if self._cuda else {"PILOTFLAME_GPUS": f"0:{self._total_mb}"}
        with tempfile.TemporaryDirectory(prefix="pilotflame-gpu-") as name, start_pilotflame(gpus) as server:
            shape, device = dict(vars(self._model.shape)), "cuda" if self._cuda else "simulated"
            (Path(name) / "handler.py").write_text(_HANDLER.format(shape=shape, device=device))
            for module in ("checkpoint.py", "llama.py"):
                shutil.copyfile(_HERE / module, Path(name) / module)
            control = Control(server.url)
            try:
                for function, most_mb in memory_mb.items():
                    needs = {"resources.gpus": 1, "resources.gpu_memory_mb": most_mb}
                    snapshot = str(self._model.folder)
                    control.deploy(name, name=function, snapshot=snapshot, **needs, **settings)
                yield control
            finally:
                control.close()

    @contextmanager
    def _filled(self) -> Iterator[None]:
        """Leaves so much of the device's memory that the weights of two functions do not fit in."""
        if not self._cuda:
            yield
            return
        left = int(1.6 * (self._needed_mb << 20))
        filled = torch.empty(max(0, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device="cuda")
        try:
            yield
        finally:
            del filled
            torch.cuda.empty_cache()

    def _call(self, control: Control, name: str, *, cold: bool | None = None) -> Reply:
        reply = control.invoke(name, {"token": TOKEN})
        if reply.body["token"] != self._model.right:
            raise RuntimeError(f"{name} answers {reply.body}, not {self._model.right}")
        if cold is not None and reply.cold != cold:
            raise RuntimeError(f"{name}: the request was to be {'cold' if cold else 'warm'}")
        return reply
