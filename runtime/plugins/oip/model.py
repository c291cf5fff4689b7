"""Finds the functions that are models of the protocol, and describes them and the server to clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

from typing_extensions import TypedDict

from ...._version import __version__
from ....errors import BadInput, UnknownFunction
from ....handlers.tensors import Tensor, declared
from ...functions.live import Live
from ...functions.registry import Functions

EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "statistics",
    "schedule_policy",
)
SERVER_NAME = "triton"
"""Clients check that the server has this name, which stands for the extensions that Triton defines."""
PLATFORM = "pilotflame"
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


def server_metadata() -> ServerMetadata:
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


@dataclass(frozen=True, slots=True)
class TensorModel:
    """A function whose event and answer are tensors."""

    live: Live
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, live: Live) -> Self | None:
        """Return a function as a model, or None if its event or its answer is not made of tensors."""
        facts = live.record.handler
        inputs, outputs = (declared(facts.get(schema) or {}) for schema in ("input_schema", "output_schema"))
        return cls(live, inputs, outputs) if inputs and outputs else None

    @property
    def version(self) -> str:
        return str(self.live.record.number)

    @property
    def ready(self) -> bool:
        """True if calls succeed. A function without workers is ready."""
        return not self.live.unavailable

    def check_version(self, version: str) -> None:
        """Raise UnknownFunction unless `version` is "", or the number or the name of the live revision."""
        record = self.live.record
        if version not in ("", self.version, record.revision):
            message = f"{record.function} has no live version {version[:40]!r}."
            raise UnknownFunction(message, remedy=f"Use version {self.version}, or name no version.")

    def metadata(self, name: str) -> dict[str, Any]:
        return {
            "name": name, "versions": [self.version], "platform": PLATFORM,
            "inputs": _described(self.inputs), "outputs": _described(self.outputs),
        }  # fmt: skip

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration as Triton has it. `max_batch_size` is 0, so the shapes have all axes.

        The gateway forms batches of whole requests, which the handler gets as a list.
        """
        return {
            "name": name, "platform": PLATFORM, "backend": PLATFORM, "max_batch_size": 0,
            "version_policy": {"latest": {"num_versions": 1}},
            "input": _configured(self.inputs), "output": _configured(self.outputs),
        }  # fmt: skip

    def indexed(self) -> dict[str, str]:
        """Return the model's row in the index of the repository."""
        reason = self.live.unavailable
        state = "UNAVAILABLE" if reason else "READY"
        return {"name": self.live.record.function, "version": self.version, "state": state, "reason": reason}


class TensorModels:
    """The models of a gateway."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._known: WeakKeyDictionary[Live, TensorModel | None] = WeakKeyDictionary()

    def find(self, name: str, check: Callable[[str], None]) -> TensorModel:
        """Return the model `name`. Names of functions have hyphens where `name` may have underscores.

        `check` gets the function's name. Raise its errors, UnknownFunction, and BadInput for a function without tensors.
        """
        function = function_of(name)
        check(function)
        model = self._model(self._functions.get(function))
        if model is None:
            message = f"{function} takes or returns no tensors."
            raise BadInput(
                message, remedy="Annotate its event and answer (docs/how-to/oip.md), or call it at /invoke."
            )
        return model

    def all(self, names: Iterable[str]) -> list[TensorModel]:
        """Return the models among these functions."""
        found = (self._model(self._functions.get(name)) for name in names)
        return [model for model in found if model is not None]

    def _model(self, live: Live) -> TensorModel | None:
        if live not in self._known:
            self._known[live] = TensorModel.of(live)
        return self._known[live]


def function_of(name: str) -> str:
    """Return the name of the function that a client means with the name of a model."""
    return name.replace("_", "-")


def _described(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    ]


def _configured(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": name, "dims": list(tensor.shape),
            "data_type": _CONFIG_TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}"),
        }
        for name, tensor in tensors.items()
    ]  # fmt: skip
