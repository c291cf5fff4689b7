"""The log of a function: its lines are kept within a limit, stored, and followed."""

import asyncio
import contextlib
from pathlib import Path

from pilotflame.runtime.ground.telemetry.log_files import LogFiles, LogLine, LogQuery, function_file
from pilotflame.runtime.ground.telemetry.logs import FOLLOWER_LINES, LogChannel, Logs

LIMIT_S = 30.0


def texts(channel: LogChannel) -> list[str]:
    return [line.text for line in channel.tail(10_000)]


def test_the_last_lines_are_kept() -> None:
    channel = LogChannel(kept=3)
    for number in range(5):
        channel.write("w1", str(number))
    assert texts(channel) == ["2", "3", "4"]
    assert [line.text for line in channel.tail(2)] == ["3", "4"]
    assert channel.tail(0) == []
    assert {line.source for line in channel.tail(3)} == {"w1"}


async def collect(
    channel: LogChannel, count: int, tail: int, into: list[LogLine], begun: asyncio.Event
) -> None:
    async with contextlib.aclosing(channel.follow(tail)) as lines:  # type: ignore[type-var]
        begun.set()
        async for line in lines:
            into.append(line)
            if len(into) == count:
                return


async def test_a_follower_gets_the_tail_then_the_rest_without_gap_or_repeat() -> None:
    channel = LogChannel()
    for number in range(5):
        channel.write("w1", str(number))
    follow = channel.follow(2)
    first = await anext(follow)
    # While the tail is still being read.
    channel.write("w1", "5")
    rest = [await anext(follow) for _ in range(2)]
    assert [line.text for line in (first, *rest)] == ["3", "4", "5"]
    await follow.aclose()  # type: ignore[attr-defined]
    channel.write("w1", "6")
    assert texts(channel)[-1] == "6"


async def test_several_follow_each_at_their_own_pace() -> None:
    channel, seen = LogChannel(), ([], [])
    begun = [asyncio.Event(), asyncio.Event()]
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for into, event in zip(seen, begun, strict=True):
            tasks.create_task(collect(channel, 3, 10, into, event))
        for event in begun:
            await event.wait()
        await asyncio.sleep(0)
        for number in range(3):
            channel.write("w", str(number))
    assert [[line.text for line in lines] for lines in seen] == [["0", "1", "2"]] * 2


async def test_a_follower_that_does_not_read_misses_lines_and_delays_nothing() -> None:
    channel = LogChannel(kept=10)
    follow = channel.follow(0)
    waiting = asyncio.ensure_future(anext(follow))
    await asyncio.sleep(0)
    for number in range(FOLLOWER_LINES + 500):
        channel.write("w", str(number))
    assert (await waiting).text == "0"
    got = [(await anext(follow)).text for _ in range(FOLLOWER_LINES - 1)]
    assert got == [str(number) for number in range(1, FOLLOWER_LINES)]
    await follow.aclose()  # type: ignore[attr-defined]


async def test_lines_name_their_function_also_if_somebody_followed_before_it_was_there(
    tmp_path: Path,
) -> None:
    files = LogFiles(tmp_path, max_bytes=40_000, keep_s=1000.0)
    files.start()
    logs = Logs(files)
    follow = logs.follow(function_file("late"), LogQuery())
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(anext(follow))  # type: ignore[arg-type]
        # The follower has searched the files when this later search is answered.
        await asyncio.sleep(0)
        await logs.history("gateway", LogQuery())
        logs.of_function("late").write("w1", "printed")
        line = await first
    assert (line.function, line.text) == ("late", "printed")
    await follow.aclose()  # type: ignore[attr-defined]
    files.close()
