"""Lists all dialects. To remove a dialect, delete its folder and its lines in this file."""

from __future__ import annotations

from ..api.backend import Backend
from ..api.routes import Route
from .aws_lambda.routes import LambdaApi
from .cloudevents.routes import EventsApi
from .cog.routes import PredictionsApi
from .replicate.routes import ReplicateApi
from .runpod.routes import QueueApi


class Dialects:
    """All dialects of a gateway."""

    def __init__(self, backend: Backend) -> None:
        replicate = ReplicateApi(backend)
        self._apis = (
            LambdaApi(backend), EventsApi(backend), PredictionsApi(backend), replicate, QueueApi(backend),
        )  # fmt: skip
        self.sweep = replicate.sweep
        """Removes expired files that callers uploaded, now and every hour. Does not return."""

    def routes(self) -> list[Route]:
        """Return the rows of all dialects for the route table."""
        return [route for api in self._apis for route in api.routes()]
