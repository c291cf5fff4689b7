"""Lists, loads and unloads models, as clients of Triton's model repository do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from ....errors import BadInput
from ...node.functions.registry import Functions
from .model import TensorModel, TensorModels, function_of
from .statistics import Statistics

LOAD_S = 300.0
CAUSE = "hook load"
DEPLOY = "Deploy the function with other settings instead."
MOST_CONFIG_CHARS = 64 << 10
_MOST_ROWS = 2**31 - 1


class Repository:
    """The functions as a model repository, with the counts of their calls. Unloading a model pauses its function."""

    def __init__(self, functions: Functions) -> None:
        self.models, self.statistics = TensorModels(functions), Statistics()
        self._functions = functions

    def index(self, names: Sequence[str], *, ready: bool) -> list[dict[str, str]]:
        """Return a row for each model among these functions; with `ready`, only for models that take requests."""
        return [model.indexed() for model in self.models.all(names) if model.ready or not ready]

    def counts(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the counts of the models among these functions."""
        self.statistics.keep({live.record.function for live in self._functions.all()})
        return [self.statistics.of(model, model.live.record.function) for model in self.models.all(names)]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Resume a function, and wait until one of its workers is ready.

        The parameter `config` replaces `max_batch_size` until the next load. Raise UnknownFunction, the errors of `wait_ready`,
        and BadInput for another parameter or another field of `config`.
        """
        function = function_of(name)
        live = self._functions.get(function)
        for parameter in parameters:
            if parameter != "config":
                raise BadInput(f"The parameter {parameter[:40]!r} is not supported.", remedy=DEPLOY)
        if "config" in parameters:
            model = self.models.find(name, lambda _function: None)
            self.models.limit_batches(_overridden(model, name, parameters["config"]))
        elif (found := self.models.of(live)) is not None and found.max_batch_size:
            self.models.limit_batches(found.limited(0))
        if live.function.paused:
            live = await self._functions.pause(function, paused=False)
        if (refusal := live.function.refusal()) is not None:
            raise refusal
        live.workers.warm(1, CAUSE)
        await live.workers.wait_ready(1, LOAD_S)

    async def unload(self, name: str) -> None:
        """Pause a function. Raise UnknownFunction if it does not exist."""
        await self._functions.pause(function_of(name), paused=True)


def _overridden(model: TensorModel, name: str, config: Any) -> TensorModel:
    """Return the model with the `max_batch_size` in a configuration. Raise BadInput, which names the field, if the
    configuration changes another field.
    """
    fields = _fields(config)
    limited = model.limited(_rows(fields.pop("max_batch_size", 0)))
    present = limited.config(name)
    for field, value in fields.items():
        if field not in present or value != present[field]:
            raise BadInput(f"config: {field[:40]} cannot be changed.", remedy=DEPLOY)
    return limited


def _fields(config: Any) -> dict[str, Any]:
    if not isinstance(config, str) or len(config) > MOST_CONFIG_CHARS:
        raise BadInput(f"config is no text of at most {MOST_CONFIG_CHARS} characters.")
    try:
        found = orjson.loads(config)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"config is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise BadInput("config is no JSON object.")
    return found


def _rows(value: Any) -> int:
    """Return a number of rows. `value` may be text, because the JSON form of protobuf may have numbers as text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 11:
        value = int(value)
    if type(value) is not int or not 0 <= value <= _MOST_ROWS:
        raise BadInput(
            f"config: max_batch_size is {value!r:.40}.", remedy="It is a whole number, 0 for no limit."
        )
    return value
