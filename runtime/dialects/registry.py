"""Lists all dialects. To remove a dialect, delete its folder and its lines in this file."""

from __future__ import annotations

from ..api.backend import Backend
from ..api.routes import Route
from .aws_lambda.routes import LambdaApi
from .cloudevents.routes import EventsApi
from .cog.routes import PredictionsApi
from .replicate.routes import ReplicateApi
from .runpod.routes import QueueApi


def dialect_routes(backend: Backend) -> list[Route]:
    """Return the rows of all dialects for the route table."""
    apis = (
        LambdaApi(backend), EventsApi(backend), PredictionsApi(backend), ReplicateApi(backend), QueueApi(backend),
    )  # fmt: skip
    return [route for api in apis for route in api.routes()]
