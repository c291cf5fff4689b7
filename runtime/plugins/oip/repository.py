"""Lists, loads and unloads models, as clients of Triton's model repository do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import BadInput
from ...functions.registry import Functions
from .model import TensorModels, function_of
from .statistics import Statistics

LOAD_S = 300.0
CAUSE = "hook load"


class Repository:
    """The functions as a model repository, with their counts. To unload a model is to pause its function."""

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

        Raise UnknownFunction, BadInput if there are parameters, and the errors of `wait_ready`.
        """
        if parameters:
            message = f"The parameter {next(iter(parameters))[:40]!r} is not supported."
            raise BadInput(message, remedy="Deploy the function with other settings instead.")
        function = function_of(name)
        live = self._functions.get(function)
        if live.function.paused:
            live = await self._functions.pause(function, paused=False)
        if (refusal := live.function.refusal()) is not None:
            raise refusal
        live.workers.warm(1, CAUSE)
        await live.workers.wait_ready(1, LOAD_S)

    async def unload(self, name: str) -> None:
        """Pause a function. Raise UnknownFunction."""
        await self._functions.pause(function_of(name), paused=True)
