"""Provides a stand-in for the `ts` package of torchserve: the names that handlers import from it.

torchserve itself needs Java only for its server, but its package brings the server's dependencies.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ....errors import HandlerFailed
from ....handlers.stand_in import stand_in_modules

SERVER_VERSION = "0.12.0"
"""The version of TorchServe whose contract the stand-in has."""
MAPPING = "index_to_name.json"


def stand_in() -> dict[str, ModuleType]:
    names = {"BaseHandler": BaseHandler}
    return stand_in_modules({
        "ts": {"__version__": SERVER_VERSION},
        "ts.context": {"Context": TorchServeContext},
        "ts.torch_handler": {},
        "ts.torch_handler.base_handler": names,
        "ts.utils": {},
        "ts.utils.util": {"PredictionException": PredictionException},
        "ts.handler_utils": {},
        "ts.handler_utils.timer": {"timed": lambda call: call},
    })  # fmt: skip


class PredictionException(Exception):
    """An error that a handler raises for its callers. `error_code` is the HTTP status of the response."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        self.message, self.error_code = message, error_code
        super().__init__(message)


class RequestMetrics:
    """Reports measurements of the requests. Their units and dimensions are dropped."""

    def __init__(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._report = report

    def add_counter(self, name: str, value: float, *_: Any, **__: Any) -> None:
        self._report({name: value})

    add_time = add_size = add_percent = add_metric = add_counter


class TorchServeContext:
    """What a handler finds in `context`: facts about the model, and about the requests of a batch."""

    def __init__(
        self, model_name: str, model_dir: str, manifest: Mapping[str, Any], batch_size: int, gpu: int | None, config: Mapping[str, Any]
    ) -> None:  # fmt: skip
        self.model_name, self.manifest, self.model_yaml_config = model_name, manifest, config
        self.system_properties = {
            "model_dir": model_dir, "gpu_id": gpu, "batch_size": batch_size, "server_name": "MMS",
            "server_version": SERVER_VERSION, "limit_max_image_pixels": True,
        }  # fmt: skip
        self.request_ids: dict[int, str] | None = None
        self.metrics = RequestMetrics(lambda _: None)
        self._headers: Sequence[Mapping[str, str]] = ()
        self.statuses: dict[int, tuple[int, str]] = {}
        """By the index of a request: the status and the phrase that the handler has set."""
        self.content_types: dict[int, str] = {}

    def begin(
        self, ids: Sequence[str], headers: Sequence[Mapping[str, str]], metrics: RequestMetrics
    ) -> None:
        """Describe the requests of one call."""
        self.request_ids, self._headers, self.metrics = dict(enumerate(ids)), headers, metrics
        self.statuses, self.content_types = {}, {}

    def get_request_id(self, idx: int = 0) -> str | None:
        return (self.request_ids or {}).get(idx)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return dict(self._headers[idx])

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self._headers[idx].get(key.lower())

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.content_types[idx] = value

    def get_response_content_type(self, idx: int) -> str | None:
        return self.content_types.get(idx)

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        if key.lower() != "content-type":
            fault = f"pilotflame does not send the response header {key[:64]!r}: only content-type."
            raise HandlerFailed(fault, remedy="Put the value into the answer.")
        self.set_response_content_type(idx, value)

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Let one request fail, if the status is an error. pilotflame sends no other status than 200 with an answer."""
        if code != 200 and not 400 <= code <= 599:
            raise HandlerFailed(
                f"pilotflame does not send the status {code}.", remedy="Set 200, or an error."
            )
        self.statuses[idx] = code, phrase

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for idx in range(len(self._headers)):
            self.set_response_status(code, phrase, idx)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        return self.statuses.get(idx, (200, ""))


class BaseHandler:
    """The base class of handlers. It loads a model that the manifest names, and runs it on tensors."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: Any = None
        self.device: Any = None
        self.context: Any = None
        self.manifest: Any = None
        self.initialized = False

    def initialize(self, context: Any) -> None:
        """Load the model: TorchScript, or the only class of `modelFile` with the state dict in `serializedFile`."""
        import torch  # noqa: PLC0415  a handler of its own may not need it

        properties, self.manifest = context.system_properties, context.manifest
        gpu = properties.get("gpu_id")
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        folder, model = Path(properties["model_dir"]), self.manifest["model"]
        weights = folder / model["serializedFile"] if model.get("serializedFile") else None
        if model.get("modelFile"):
            self.model = _only_class(folder / model["modelFile"])()
            if weights is not None:
                self.model.load_state_dict(torch.load(weights, map_location=self.device, weights_only=True))
            self.model.to(self.device)
        elif weights is not None and weights.suffix == ".pt":
            self.model = torch.jit.load(str(weights), map_location=self.device)  # type: ignore[no-untyped-call]
        else:
            raise RuntimeError(
                "No model weights could be loaded: the manifest names no modelFile and no .pt file."
            )
        self.model.eval()
        if (folder / MAPPING).is_file():
            self.mapping = json.loads((folder / MAPPING).read_text(encoding="utf-8"))
        self.initialized = True

    def preprocess(self, data: Any) -> Any:
        import torch  # noqa: PLC0415  as above

        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        import torch  # noqa: PLC0415  as above

        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))


def _only_class(path: Path) -> Any:
    """Return the only class that a module defines. Its folder is already importable."""
    module = importlib.import_module(path.stem)
    found = [
        one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"Expected only one class as model definition. {found}")
    return found[0]
