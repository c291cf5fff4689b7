"""What a process prints: lines from any split of its output, and the invocation that each line belongs to."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.runtime.ground.telemetry.log_stream import MAX_LINE_BYTES, LogStream
from pilotflame.runtime.ground.telemetry.logs import Capture, LogChannel


def texts(channel: LogChannel) -> list[str]:
    return [line.text for line in channel.tail(10_000)]


class Output:
    """A process's end of its log connection."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.dropped = list[int]()
        self.channel = LogChannel(on_dropped=self.dropped.append)
        self.stream = LogStream(theirs, self.channel, "w1", "0123")

    async def end(self) -> None:
        self.sock.close()
        follow = self.channel.follow(0)
        while self.stream.alive:
            await asyncio.sleep(0)
        await follow.aclose()  # type: ignore[attr-defined]


@pytest.fixture
async def output() -> AsyncIterator[Output]:
    made = Output()
    yield made
    made.stream.close()
    made.sock.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=30), max_size=10
    ),
    st.booleans(),
    st.data(),
)
def test_any_split_gives_the_same_lines(lines: list[str], ended: bool, data: st.DataObject) -> None:
    stream = "\n".join(lines).encode() + (b"\n" if ended and lines else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))

    async def run() -> list[str]:
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        output = Output()
        for piece in pieces:
            output.sock.sendall(piece)
            await asyncio.sleep(0)
        await output.end()
        return texts(output.channel)

    expected = lines if ended or not lines or lines[-1] else lines[:-1]
    assert asyncio.run(run()) == expected


async def test_the_last_words_without_a_newline_are_kept(output: Output) -> None:
    output.sock.sendall(b"one\r\nlast words")
    await output.end()
    assert texts(output.channel) == ["one", "last words"]


async def test_bytes_that_are_no_text_are_shown_as_such(output: Output) -> None:
    output.sock.sendall(b"a\xffb\n")
    await output.end()
    assert texts(output.channel) == ["a\ufffdb"]


async def test_a_line_without_end_is_cut_into_pieces_and_none_is_lost(output: Output) -> None:
    written = b"x" * (3 * MAX_LINE_BYTES + 5)
    loop = asyncio.get_running_loop()
    output.sock.setblocking(False)
    await loop.sock_sendall(output.sock, written)
    await output.end()
    assert "".join(texts(output.channel)) == written.decode()
    assert all(len(text) <= MAX_LINE_BYTES for text in texts(output.channel))


@pytest.mark.parametrize("extra", [0, 1, MAX_LINE_BYTES + 3])
async def test_a_long_line_that_ends_is_cut_into_pieces_too(output: Output, extra: int) -> None:
    output.sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(output.sock, b"y" * (MAX_LINE_BYTES + extra) + b"\nnext\n")
    await output.end()
    lines = texts(output.channel)
    assert "".join(lines[:-1]) == "y" * (MAX_LINE_BYTES + extra)
    assert lines[-1] == "next"
    assert all(len(text) <= MAX_LINE_BYTES for text in lines)


async def test_closing_twice_is_once(output: Output) -> None:
    output.stream.close()
    output.stream.close()
    assert not output.stream.alive


# -- whose lines they are


async def test_marked_lines_carry_their_invocation_and_are_captured_for_it_alone(output: Output) -> None:
    mine, yours = Capture(1000), Capture(1000)
    output.stream.record(1, "one", mine, alone=True)
    output.stream.record(2, "two", yours, alone=False)
    output.sock.sendall(
        b"\x1e0123 i 1 one mine\n\x1e0123 w 2 two yours\nnobody's\nraw\x1e0123 e 1 one late\n"
    )
    output.stream.drain()
    assert [(line.request_id, line.level, line.text) for line in output.channel.tail(9)] == [
        ("one", "info", "mine"), ("two", "warning", "yours"), ("", "info", "nobody's"), ("", "info", "raw"),
        ("one", "error", "late"),
    ]  # fmt: skip
    assert (mine.text(), yours.text()) == ("mine\nERROR late", "WARNING yours")


async def test_unmarked_lines_belong_to_an_invocation_that_is_alone_from_start_to_end(output: Output) -> None:
    capture = Capture(1000)
    output.sock.sendall(b"before\n")
    output.stream.record(1, "one", capture, alone=True)
    output.sock.sendall(b"during\n")
    output.stream.end(1)
    output.sock.sendall(b"after\n")
    await output.end()
    assert capture.text() == "during"
    assert texts(output.channel) == ["before", "during", "after"]


async def test_unmarked_lines_belong_to_nobody_once_a_second_invocation_runs(output: Output) -> None:
    capture = Capture(1000)
    output.stream.record(1, "one", capture, alone=True)
    output.sock.sendall(b"alone\n")
    output.stream.crowd()
    output.sock.sendall(b"crowded\n")
    output.stream.end(1)
    assert capture.text() == "alone"


async def test_the_report_of_a_crash_is_for_the_owner(output: Output) -> None:
    capture = Capture(1000)
    output.stream.record(1, "one", capture, alone=True)
    output.sock.sendall(b"last\nFatal Python error: Segmentation fault\n  File secret.py\n")
    await output.end()
    assert capture.text() == "last"
    assert texts(output.channel)[-1] == "  File secret.py"


async def test_a_mark_with_another_word_is_text(output: Output) -> None:
    capture = Capture(1000)
    output.stream.record(1, "one", capture, alone=False)
    output.sock.sendall(b"\x1e9999 i 1 one forged\n\x1e0123 i x one broken\n")
    await output.end()
    assert capture.text() == ""
    assert texts(output.channel) == ["\x1e9999 i 1 one forged"]


async def test_a_line_that_goes_on_is_one_line_again_within_the_limit(output: Output) -> None:
    output.sock.sendall(b"\x1e0123 i+ 1 one a\n\x1e0123 i+ 2 two x\n\x1e0123 i 1 one b\n")
    output.sock.setblocking(False)
    for _ in range(3):
        await asyncio.get_running_loop().sock_sendall(
            output.sock, b"\x1e0123 i+ 3 many " + b"y" * 10_000 + b"\n"
        )
    await output.end()
    lines = texts(output.channel)
    assert lines[0] == "ab"
    assert "x" in lines
    assert "".join(line for line in lines if "y" in line) == "y" * 30_000
    assert max(map(len, lines)) <= MAX_LINE_BYTES


def test_a_capture_keeps_the_last_lines() -> None:
    capture = Capture(10)
    for number in range(100):
        capture.add(str(number))
    assert capture.text() == "97\n98\n99"
    capture.add("x" * 50)
    assert capture.text() == "x" * 10


async def test_a_process_that_prints_without_end_gets_few_lines_in_one_turn_of_the_loop(
    output: Output,
) -> None:
    turns, written = [0], list[str]()
    with output.channel.listen(lambda line: (written.append(line.text), turns.append(turns.pop() + 1))):
        output.sock.sendall(b"x\n" * 5_000)
        while len(written) < 5_000:
            await asyncio.sleep(0)
            turns.append(0)
    assert max(turns) <= 200
    assert written == ["x"] * 5_000


async def test_lines_beyond_what_a_function_may_print_are_dropped_and_counted(output: Output) -> None:
    printed, seen = 0, list[str]()
    with output.channel.listen(lambda line: seen.append(line.text)):
        for _ in range(10):
            output.sock.sendall(b"x\n" * 10_000)
            printed += 10_000
            output.stream.drain()
        kept = seen.count("x")
        assert 10_000 <= kept < 20_000
        async with asyncio.timeout(10):
            while not any("lines were dropped" in text for text in seen):
                await asyncio.sleep(0.05)
    assert any(f"{printed - kept} lines were dropped" in text for text in seen)
    assert sum(output.dropped) == printed - kept


async def test_output_without_newlines_is_limited_too(output: Output) -> None:
    sizes, sent = list[int](), 0
    with output.channel.listen(lambda line: sizes.append(len(line.text))):
        while sent < 40 << 20:
            sent += output.sock.send(b"x" * (64 << 10))
            output.stream.drain()
    # The first 10,000 units allow 9.8 MB. The rest is allowance that is gained while the test runs.
    assert 9_000_000 < sum(sizes) < sent // 2
    assert sum(output.dropped) > 100


async def test_the_beginning_of_a_dropped_line_is_dropped_too(output: Output) -> None:
    output.sock.sendall(b"the beginning, ")
    output.stream.drain()
    output.channel.allowance.take(10**9, 0, time.monotonic())
    output.sock.sendall(b"and the end\nanother line")
    output.stream.drain()
    await output.end()
    assert texts(output.channel) == ["another line"]
    assert output.dropped == [1]


async def test_a_function_that_has_printed_too_much_may_print_again_later(output: Output) -> None:
    output.channel.allowance.take(10**9, 0, time.monotonic())
    output.sock.sendall(b"dropped\n")
    output.stream.drain()
    async with asyncio.timeout(10):
        while not any("kept" in text for text in texts(output.channel)):
            output.sock.sendall(b"kept\n")
            await asyncio.sleep(0.05)
    assert "dropped" not in texts(output.channel)
