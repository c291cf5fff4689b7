"""Defines and validates a schedule of a function, which is a `[[schedule]]` table of pilotflame.toml.

A schedule is a cron expression with a time zone. Expressions mean what Debian's cron makes of them. When clocks are set
forward, a fixed time in the skipped hour fires at the end of the gap. When clocks are set back, a fixed time in the
repeated hour fires the first time. With `*` in the field of minutes or hours, the schedule fires at each matching time
that passes.
"""

from __future__ import annotations

import difflib
import zoneinfo
from datetime import UTC, datetime
from typing import Annotated

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, Field

from .validation import PositiveSeconds, checked

MAX_CHARS = 100
FIELDS = 5
_EXAMPLE = 'allowed: five fields, minute, hour, day, month and weekday, as "0 8 * * mon-fri"'


def _cron_problem(cron: str) -> str | None:
    if len(cron) > MAX_CHARS:
        return f"schedule.cron has {len(cron)} characters; allowed: {MAX_CHARS}"
    if len(cron.split()) != FIELDS:
        return f"schedule.cron is {cron!r}; {_EXAMPLE}"
    try:
        fires = next(CronSim(cron, datetime.now(UTC)), None)
    except CronSimError as error:
        return f"schedule.cron is {cron!r}: {str(error).lower()}; {_EXAMPLE}"
    return None if fires is not None else f"schedule.cron is {cron!r}, which never comes; {_EXAMPLE}"


def _timezone_problem(name: str) -> str | None:
    try:
        zoneinfo.ZoneInfo(name)
    # OSError: the name is the name of a folder of zones.
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = difflib.get_close_matches(name[:MAX_CHARS], zoneinfo.available_timezones(), n=1)
        hint = f"did you mean {near[0]}?" if near else 'allowed: "UTC", or a place, as "Europe/Berlin"'
        return f"schedule.timezone is {name[:MAX_CHARS]!r}, which is no time zone; {hint}"
    return None


class Schedule(BaseModel, frozen=True, extra="forbid", strict=True):
    """The times at which workers start before they are needed, the number of workers, and how long they are kept."""

    cron: Annotated[str, checked(_cron_problem)] = Field(
        description="When: minute, hour, day, month, weekday, as 0 8 * * mon-fri."
    )
    timezone: Annotated[str, checked(_timezone_problem)] = Field(
        "UTC", description="The time zone of `cron`, as Europe/Berlin."
    )
    workers: int = Field(1, ge=1, le=1024, description="How many workers to have from then on.")
    for_s: PositiveSeconds = Field(
        300.0, description="Seconds for which they are kept even without requests."
    )

    def next_fire(self, after: datetime) -> datetime | None:
        """Return when the schedule fires first after `after`, in UTC; None if that is more than 50 years ahead."""
        times = CronSim(self.cron, after.astimezone(zoneinfo.ZoneInfo(self.timezone)))
        # In the hour that comes twice, cronsim may return a time that has passed.
        return next((time for found in times if (time := found.astimezone(UTC)) > after), None)

    def last_fire(self, until: datetime) -> datetime | None:
        """Return when the schedule fired last, at or before `until`, in UTC; None if that was over 50 years ago."""
        # cronsim leaves out the time at which it starts, unless that time has a fraction of a second.
        local = until.replace(microsecond=1).astimezone(zoneinfo.ZoneInfo(self.timezone))
        times = CronSim(self.cron, local, reverse=True)
        return next((time for found in times if (time := found.astimezone(UTC)) <= until), None)
