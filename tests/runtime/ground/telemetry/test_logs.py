"""The log of a function: its lines are kept within a limit, stored, and followed."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from pilotflame.runtime.ground.telemetry import logs as module
from pilotflame.runtime.ground.telemetry.log_files import LogFiles, LogLine, LogQuery, function_file
from pilotflame.runtime.ground.telemetry.logs import FOLLOWER_LINES, MAX_TEXT_CHARS, Capture, LogChannel, Logs

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
    # Write a line while the follower still reads the tail.
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


def test_lines_have_rising_times_and_a_limited_length() -> None:
    channel, heard = LogChannel(), list[str]()
    with channel.listen(lambda line: heard.append(line.text)):
        for text in ("a", "b" * (MAX_TEXT_CHARS + 1)):
            channel.write("w1", text)
    channel.write("w1", "c")
    assert heard == ["a", "b" * MAX_TEXT_CHARS]
    times = [line.at for line in channel.tail(10)]
    assert times == sorted(set(times))


def test_the_last_words_of_a_crash_are_its_cause_and_the_innermost_frame() -> None:
    channel = LogChannel()
    report = (
        "about to abort", "Fatal Python error: Aborted", "", "Current thread 0x00007f (most recent call first):",
        '  File "handler.py", line 4 in setup', '  File "zygote.py", line 9 in main', "", "Extension modules: a (total: 1)",
    )  # fmt: skip
    for text in report:
        channel.write("w1", text)
    log = channel.of("r1")
    assert log.last_words("w1", 2, []) == 'Fatal Python error: Aborted | File "handler.py", line 4 in setup'
    for text in ("", "Thread 0x00008f (most recent call first):", '  File "zygote.py", line 9 in main'):
        channel.write("w1", text)
    assert log.last_words("w1", 2, []) == 'Fatal Python error: Aborted | File "handler.py", line 4 in setup'
    channel.write("w1", "went on")
    assert log.last_words("w1", 2, []).endswith(" | went on")


def test_the_last_words_are_those_of_a_worker_and_of_its_calls() -> None:
    log = LogChannel().of("r1")
    for source, request_id in (("w1", "q1"), ("w2", "q2"), ("w1", "q3"), ("w1", ""), ("w1", "q2")):
        log.write(source, f"{source} {request_id}".strip(), request_id=request_id)
    assert log.last_words("w1", 5, ["q1", "q2"]) == "w1 q1 | w1 | w1 q2"
    assert log.last_words("w1", 2, ["q1", "q2"]) == "w1 | w1 q2"
    assert log.last_words("w3", 5, []) == ""
    assert {line.revision for line in log.channel.tail(10)} == {"r1"}


@pytest.mark.parametrize(
    ("lines", "kept"),
    [(["abc"], "abc"), (["abc", "de"], "abc\nde"), (["abc", "de", "fgh"], "de\nfgh"), (["a" * 20], "a" * 8)],
)
def test_a_capture_keeps_the_last_characters(lines: list[str], kept: str) -> None:
    told = list[int]()
    capture = Capture(8, lambda: told.append(1))
    for line in lines:
        capture.add(line)
    assert (capture.text(), len(told)) == (kept, len(lines))


async def test_dropped_lines_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.01)
    counted = list[int]()
    channel = LogChannel(on_dropped=counted.append)
    for lines in (3, 4):
        channel.note_dropped(lines)
    follow = channel.follow(0)
    async with asyncio.timeout(LIMIT_S):
        line = await anext(follow)
    assert (line.text.partition(" lines")[0], line.level, counted) == ("7", "warning", [3, 4])
    await follow.aclose()  # type: ignore[attr-defined]


async def test_the_log_of_a_deleted_function_ends_and_the_next_function_has_another_one(
    tmp_path: Path,
) -> None:
    files = LogFiles(tmp_path, max_bytes=40_000, keep_s=1000.0)
    files.start()
    logs, heard, kept = Logs(files), list[str](), list[str]()
    logs.logged.append(lambda line: heard.append(line.text))
    logs.kept.append(lambda file, _line: kept.append(file))
    channel = logs.of_function("f")
    assert logs.of_function("f") is channel
    with channel.subscribe() as news:
        for number in range(FOLLOWER_LINES):
            channel.write("w1", str(number))
        channel.end()
        channel.write("w1", "late")
        read = [news.get_nowait() for _ in range(news.qsize())]
    # A follower gets the end (None), even if it has read nothing and its queue is full.
    assert None in read
    assert heard[-1] == "f was deleted"
    assert "late" not in heard
    assert set(kept) == {function_file("f")}
    assert logs.of_function("f") is not channel
    logs.channel("gateway").write("gateway", "of no function")
    assert heard[-1] == "f was deleted"
    assert await logs.exists(function_file("f"))
    assert not await logs.exists(function_file("g"))
    files.close()
