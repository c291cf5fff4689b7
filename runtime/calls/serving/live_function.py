"""Defines a deployed function as jobs and alerts see it."""

from __future__ import annotations

from typing import Protocol

from ...ground.settings.function_settings import FunctionSettings
from ...ground.telemetry.logs import LogChannel
from .revision import Revision


class LiveRecord(Protocol):
    """The facts that a deploy has stored about a revision."""

    @property
    def function(self) -> str: ...

    @property
    def revision(self) -> str: ...

    @property
    def deployed_by(self) -> str:
        """The id of the API key that has deployed the revision."""

    @property
    def settings(self) -> FunctionSettings: ...


class LiveFunction(Protocol):
    """A function that is deployed now."""

    revision: Revision
    logs: LogChannel
    warnings: list[str]

    @property
    def record(self) -> LiveRecord: ...
