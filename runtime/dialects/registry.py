"""The registry of dialects. Deleting a dialect's folder and its lines here removes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..api.backend import Backend
from ..api.responses import ErrorFormat
from ..api.routes import Route
from .aws_lambda.routes import LambdaApi
from .cloudevents.routes import EventsApi
from .cog.routes import PredictionsApi
from .runpod.routes import QueueApi


class Dialect(Protocol):
    """What a dialect adds to the gateway."""

    error_formats: Mapping[str, ErrorFormat]
    """How errors are sent below a path, where that is not the gateway's own way."""

    def routes(self) -> list[Route]:
        """Return the rows of the route table, with their description."""


DIALECTS: tuple[Callable[[Backend], Dialect], ...] = (
    LambdaApi,
    EventsApi,
    PredictionsApi,
    QueueApi,
)
