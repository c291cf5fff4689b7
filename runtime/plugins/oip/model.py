"""Finds the functions that are models of the protocol, and describes them and the server to clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from typing_extensions import TypedDict

from ...._version import __version__
from ....errors import BadInput, UnknownFunction
from ....handlers.tensors import Tensor, declared
from ...node.functions.live import Live
from ...node.functions.registry import Functions

EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "statistics",
    "schedule_policy",
)
SERVER_NAME = "triton"
"""Clients check this name. It says that the server supports the extensions that Triton defines."""
PLATFORM = "pilotflame"
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}
_Facts: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, Tensor], int]


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
    max_batch_size: int = 0
    """The most rows of a request, and of a batch of requests; 0 for no limit. The latest load of the model has set it. A row is
    one index of the first axis.
    """

    @property
    def version(self) -> str:
        return str(self.live.record.number)

    @property
    def ready(self) -> bool:
        """True if calls can succeed. A function without workers is ready, too, because a call starts a worker."""
        return not self.live.unavailable

    @property
    def decoupled(self) -> bool:
        """True if the model may send several responses to a request, or none."""
        return self.live.revision.streaming

    @property
    def has_cache(self) -> bool:
        """True if the gateway stores the function's answers."""
        return self.live.record.settings.response_cache.ttl_s is not None

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
        """Return the configuration in Triton's form. Unless `max_batch_size` is 0, the shapes omit the first axis.

        The gateway forms batches of whole requests. The handler gets a batch as a list.
        """
        first = 1 if self.max_batch_size else 0
        return {
            "name": name, "platform": PLATFORM, "backend": PLATFORM, "max_batch_size": self.max_batch_size,
            "version_policy": {"latest": {"num_versions": 1}}, "model_transaction_policy": {"decoupled": self.decoupled},
            "input": _configured(self.inputs, first), "output": _configured(self.outputs, first),
        }  # fmt: skip

    def limited(self, max_batch_size: int) -> TensorModel:
        """Return the model with another `max_batch_size`. Raise BadInput if its tensors have no axis for rows."""
        if max_batch_size:
            for name, tensor in (*self.inputs.items(), *self.outputs.items()):
                if tuple(tensor.shape[:1]) != (-1,):
                    message = f"max_batch_size needs tensors with any number of rows; {name} has the shape {list(tensor.shape)}."
                    raise BadInput(message, remedy="Let the first axis of all tensors be -1.")
        return replace(self, max_batch_size=max_batch_size)

    def largest_batch(self, rows: int) -> int:
        """Return how many requests of `rows` rows fit into a batch of at most `max_batch_size` rows; 0 for no limit. Raise
        BadInput if one such request is too large.
        """
        if self.max_batch_size and rows > self.max_batch_size:
            message = f"inference request batch-size must be <= {self.max_batch_size}; it is {rows}."
            raise BadInput(message, remedy="Send fewer rows, or load the model without max_batch_size.")
        # Assume that no other request has more rows. A larger request has a smaller limit, and a batch keeps the smallest
        # limit of its requests.
        return self.max_batch_size // max(1, rows)

    def indexed(self) -> dict[str, str]:
        """Return the model's row in the index of the repository."""
        reason = self.live.unavailable
        state = "UNAVAILABLE" if reason else "READY"
        return {"name": self.live.record.function, "version": self.version, "state": state, "reason": reason}


class TensorModels:
    """The models of a gateway."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        # The fields of a TensorModel without `live`. A value that refers to its key `live` would never be freed.
        self._known: WeakKeyDictionary[Live, _Facts | None] = WeakKeyDictionary()

    def find(self, name: str, check: Callable[[str], None]) -> TensorModel:
        """Return the model `name`. Names of functions have hyphens where `name` may have underscores.

        `check` gets the function's name. Raise the errors of `check`, UnknownFunction, and BadInput for a function without
        tensors.
        """
        function = function_of(name)
        check(function)
        model = self.of(self._functions.get(function))
        if model is None:
            message = f"{function} takes or returns no tensors."
            raise BadInput(
                message, remedy="Annotate its event and answer (docs/how-to/oip.md), or call it at /invoke."
            )
        return model

    def limit_batches(self, model: TensorModel) -> None:
        """Let the function of `model` form batches of at most `max_batch_size`, until its revision is replaced."""
        self._known[model.live] = (model.inputs, model.outputs, model.max_batch_size)
        model.live.limit_batches(model.max_batch_size or None)

    def all(self, names: Iterable[str]) -> list[TensorModel]:
        """Return the models among these functions."""
        found = (self.of(self._functions.get(name)) for name in names)
        return [model for model in found if model is not None]

    def of(self, live: Live) -> TensorModel | None:
        """Return a function as a model, or None if its event or its answer is not made of tensors."""
        if live not in self._known:
            facts = live.record.handler
            inputs, outputs = (
                declared(facts.get(schema) or {}) for schema in ("input_schema", "output_schema")
            )
            self._known[live] = (inputs, outputs, 0) if inputs and outputs else None
        found = self._known[live]
        return None if found is None else TensorModel(live, *found)


def function_of(name: str) -> str:
    """Return the name of the function that a client means with the name of a model."""
    return name.replace("_", "-")


def _described(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    ]


def _configured(tensors: Mapping[str, Tensor], first: int) -> list[dict[str, Any]]:
    """Return the tensors with their axes from `first` on."""
    return [
        {
            "name": name, "dims": list(tensor.shape[first:]),
            "data_type": _CONFIG_TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}"),
        }
        for name, tensor in tensors.items()
    ]  # fmt: skip
