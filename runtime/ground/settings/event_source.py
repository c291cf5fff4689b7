"""Defines the settings of all event sources, which are the `[[source]]` tables of pilotflame.toml."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ....entry_points import SOURCES, load_one, offers
from ....errors import PluginError

LOG = logging.getLogger(__name__)


class EventSource(BaseModel, frozen=True, extra="forbid", strict=True):
    """A queue whose messages run as jobs. Plugins define the kinds of queues.

    A plugin offers a subclass under the entry point group `pilotflame.sources`. The entry's name is the value of `type`.
    """

    opener: ClassVar[str]
    """The function, as "package.module:name", that gets a source and an `Identity`, and returns a `MessageQueue` and a
    `Sink` or None. The function does not connect to the queue yet.
    """
    package: ClassVar[str] = ""
    """The optional package that this kind of source needs; "" for none."""
    extra: ClassVar[str] = ""
    """The extra of pilotflame that installs that package."""
    longest_s: ClassVar[float] = 43_200
    """How long a message may be in progress."""
    # This time is long enough for a restart of a service that the handler calls, and much shorter than the visibility timeout. Later failures wait up to 900 s.
    backoff_s: ClassVar[int] = 5
    """Seconds before the message of a failed job is delivered again. Each failure doubles this time."""

    type: str = Field(description="The kind of message bus.")
    concurrency: int | None = Field(
        None, ge=1, le=10_000, description="Messages in progress; by default as many as all workers can run."
    )

    @property
    def queue_name(self) -> str:
        """A short name, for logs and metrics."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The text that tells people which queue it is."""
        raise NotImplementedError

    @property
    def scope(self) -> str:
        """Messages of two sources of this type with the same scope and the same id are the same message."""
        return self.address

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses that the gateway calls for this source, and the gateway's own profile that the source uses, by the key
        of the setting. A policy may forbid them.
        """
        return {"queue": self.address}

    @property
    def lease_s(self) -> float:
        """The seconds after which the queue delivers a message again, unless the message was deleted or its lease
        extended.
        """
        raise NotImplementedError


@functools.cache
def source_kinds() -> dict[str, type[EventSource]]:
    """Return the kinds of all installed plugins by their `type`. A plugin that cannot be loaded is left out, with a
    warning in the log.
    """
    found = dict[str, type[EventSource]]()
    for name, offer in offers(SOURCES).items():
        try:
            found[name] = load_one(offer)
        except PluginError as error:
            LOG.warning("%s", error)
    return found


class _OneOfTheKinds:
    """Makes pydantic validate a table by its `type`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = {name: handler.generate_schema(kind) for name, kind in source_kinds().items()}
        return core_schema.tagged_union_schema(dict(kinds), discriminator="type")


AnySource = Annotated[EventSource, _OneOfTheKinds()]
