"""Schedules: when they fire, also where clocks change, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SettingsError
from pilotflame.runtime.ground.settings.function_settings import read_settings
from pilotflame.runtime.ground.settings.schedule import Schedule
from pilotflame.runtime.ground.settings.validation import validate

# The zones without Lord Howe, where clocks change by half an hour: there, cronsim leaves out one fire of `30 * * * *`.
BY_THE_HOUR = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "America/Sao_Paulo"]
ZONES = [*BY_THE_HOUR, "Australia/Lord_Howe"]
# Around changes of clocks: Berlin and New York in 2026, Lord Howe (by half an hour), and an ordinary day.
DAYS = [
    datetime(2026, *day, tzinfo=UTC) for day in ((3, 8), (3, 29), (4, 4), (10, 3), (10, 25), (11, 1), (6, 15))
]


def fires(schedule: Schedule, start: datetime, end: datetime) -> list[datetime]:
    found = []
    time = schedule.next_fire(start)
    while time is not None and time <= end:
        found.append(time)
        time = schedule.next_fire(time)
    return found


minutes, hours = st.integers(0, 59), st.integers(0, 23)
fixed = st.builds("{} {} * * *".format, minutes, hours)
steps = st.builds("*/{} * * * *".format, st.sampled_from([7, 10, 15, 30]))
hourly = st.builds("{} * * * *".format, minutes)
schedules = st.builds(Schedule, cron=fixed, timezone=st.sampled_from(ZONES)) | st.builds(
    Schedule, cron=steps | hourly, timezone=st.sampled_from(BY_THE_HOUR)
)
times = st.builds(
    lambda day, s: day + timedelta(seconds=s), st.sampled_from(DAYS), st.floats(-86_400, 2 * 86_400)
)


@given(schedules, times)
def test_the_next_time_is_later_and_the_last_is_the_one_before(schedule: Schedule, now: datetime):
    following = schedule.next_fire(now)
    last = schedule.last_fire(now)
    assert following is not None
    assert last is not None
    assert last <= now < following
    # No fire lies between the two times, in either direction.
    assert schedule.next_fire(last) == following
    assert schedule.last_fire(following) == following
    assert schedule.last_fire(following - timedelta(seconds=1)) == last


@given(st.integers(0, 23), minutes, st.sampled_from(ZONES), st.sampled_from(DAYS))
def test_a_fixed_time_comes_once_a_day_whatever_the_clocks_do(
    hour: int, minute: int, zone: str, day: datetime
):
    schedule = Schedule(cron=f"{minute} {hour} * * *", timezone=zone)
    local = ZoneInfo(zone)
    found = [
        time.astimezone(local) for time in fires(schedule, day - timedelta(days=3), day + timedelta(days=3))
    ]
    dates = [time.date() for time in found]
    assert dates == sorted(set(dates))
    # Six days in UTC have up to an hour more or less of local time if clocks change. The scheduled time may be in this hour.
    assert len(dates) in (5, 6, 7)
    for time in found:
        nominal = time.replace(hour=hour, minute=minute)
        # The time is the scheduled one, or the end of the gap that contains the scheduled time.
        skipped = nominal.astimezone(UTC).astimezone(local) != nominal
        assert (time.hour, time.minute) == (hour, minute) or skipped


@given(hourly | steps, st.sampled_from(BY_THE_HOUR), st.sampled_from(DAYS))
def test_what_comes_every_hour_follows_the_time_that_passes(cron: str, zone: str, day: datetime):
    schedule, local = Schedule(cron=cron, timezone=zone), ZoneInfo(zone)
    field = cron.split(maxsplit=1)[0]
    wanted = range(0, 60, int(field[2:])) if field.startswith("*") else [int(field)]
    passing = [day + timedelta(minutes=n) for n in range(1, 2 * 1440)]
    expected = [time for time in passing if time.astimezone(local).minute in wanted]
    assert fires(schedule, day, passing[-1]) == expected


def test_the_days_on_which_berlin_changes_its_clocks():
    berlin = ZoneInfo("Europe/Berlin")

    def on(day: tuple[int, int], cron: str) -> list[str]:
        start = datetime(2026, *day, tzinfo=berlin)
        schedule = Schedule(cron=cron, timezone="Europe/Berlin")
        return [f"{time:%H:%M}" for time in fires(schedule, start, start + timedelta(hours=20))]

    assert on((3, 29), "0 8 * * *") == ["06:00"]
    # 02:30 does not exist: it fires at 03:00 CEST, which is 01:00 in UTC.
    assert on((3, 29), "30 2 * * *") == ["01:00"]
    assert on((10, 25), "0 8 * * *") == ["07:00"]
    # 02:30 comes twice, in UTC at 00:30 and 01:30.
    assert on((10, 25), "30 2 * * *") == ["00:30"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"cron": "0 25 * * *"}, ["schedule.cron", "'0 25 * * *'", "bad hour"]),
        ({"cron": "0 8 * *"}, ["schedule.cron", "five fields"]),
        ({"cron": "* * * * * *"}, ["schedule.cron", "five fields"]),
        ({"cron": "0 0 30 2 *"}, ["schedule.cron", "bad day-of-month"]),
        ({"cron": "* * */20 * 1L"}, ["schedule.cron", "never comes"]),
        ({"cron": "0 " * 60}, ["schedule.cron has 120 characters"]),
        ({"cron": "0 8 * * *", "timezone": "Europe/Berln"}, ["schedule.timezone", "did you mean Europe/Berlin?"]),
        ({"cron": "0 8 * * *", "timezone": "Europe"}, ["schedule.timezone is 'Europe'"]),
        ({"cron": "0 8 * * *", "timezone": "../../etc/passwd"}, ["schedule.timezone"]),
        ({"cron": "0 8 * * *", "timezone": ""}, ["schedule.timezone"]),
        ({"cron": "0 8 * * *", "workers": 0}, ["workers is 0"]),
        ({"cron": "0 8 * * *", "at": "8"}, ["at is not a setting"]),
    ],
)  # fmt: skip
def test_what_is_refused(table: dict[str, object], words: list[str]):
    with pytest.raises(SettingsError) as caught:
        validate(Schedule, table, [], "The schedule", "")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_function_does_not_come_after_itself(tmp_path: Path):
    overrides = {"name": "embed", "after": "transcribe,embed"}
    with pytest.raises(SettingsError, match="after has 'embed', which is this function"):
        read_settings(tmp_path, overrides=overrides)
    assert read_settings(tmp_path, overrides=overrides | {"name": "other"}).after == ("transcribe", "embed")
