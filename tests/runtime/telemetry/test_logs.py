"""The log: lines from any split of a process's output, kept within a limit, and followed."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.runtime.telemetry.logs import FOLLOWER_LINES, MAX_LINE_BYTES, LogBook, LogLine, LogStream

LIMIT_S = 30.0


def texts(book: LogBook) -> list[str]:
    return [line.text for line in book.tail(10_000)]


def test_the_last_lines_are_kept() -> None:
    book = LogBook(kept=3)
    for number in range(5):
        book.write("w1", str(number))
    assert texts(book) == ["2", "3", "4"]
    assert [line.text for line in book.tail(2)] == ["3", "4"]
    assert book.tail(0) == []
    assert {line.source for line in book.tail(3)} == {"w1"}


async def collect(book: LogBook, count: int, tail: int, into: list[LogLine], begun: asyncio.Event) -> None:
    async with contextlib.aclosing(book.follow(tail)) as lines:  # type: ignore[type-var]
        begun.set()
        async for line in lines:
            into.append(line)
            if len(into) == count:
                return


async def test_a_follower_gets_the_tail_then_the_rest_without_gap_or_repeat() -> None:
    book = LogBook()
    for number in range(5):
        book.write("w1", str(number))
    follow = book.follow(2)
    first = await anext(follow)
    # While the tail is still being read.
    book.write("w1", "5")
    rest = [await anext(follow) for _ in range(2)]
    assert [line.text for line in (first, *rest)] == ["3", "4", "5"]
    await follow.aclose()  # type: ignore[attr-defined]
    book.write("w1", "6")
    assert texts(book)[-1] == "6"


async def test_several_follow_each_at_their_own_pace() -> None:
    book, seen = LogBook(), ([], [])
    begun = [asyncio.Event(), asyncio.Event()]
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for into, event in zip(seen, begun, strict=True):
            tasks.create_task(collect(book, 3, 10, into, event))
        for event in begun:
            await event.wait()
        await asyncio.sleep(0)
        for number in range(3):
            book.write("w", str(number))
    assert [[line.text for line in lines] for lines in seen] == [["0", "1", "2"]] * 2


async def test_a_follower_that_does_not_read_misses_lines_and_delays_nothing() -> None:
    book = LogBook(kept=10)
    follow = book.follow(0)
    waiting = asyncio.ensure_future(anext(follow))
    await asyncio.sleep(0)
    for number in range(FOLLOWER_LINES + 500):
        book.write("w", str(number))
    assert (await waiting).text == "0"
    got = [(await anext(follow)).text for _ in range(FOLLOWER_LINES - 1)]
    assert got == [str(number) for number in range(1, FOLLOWER_LINES)]
    await follow.aclose()  # type: ignore[attr-defined]


class Output:
    """A process's end of its log connection."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.book = LogBook()
        self.stream = LogStream(theirs, self.book, "w1")

    async def end(self) -> None:
        self.sock.close()
        follow = self.book.follow(0)
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
        return texts(output.book)

    expected = lines if ended or not lines or lines[-1] else lines[:-1]
    assert asyncio.run(run()) == expected


async def test_the_last_words_without_a_newline_are_kept(output: Output) -> None:
    output.sock.sendall(b"one\r\nlast words")
    await output.end()
    assert texts(output.book) == ["one", "last words"]


async def test_bytes_that_are_no_text_are_shown_as_such(output: Output) -> None:
    output.sock.sendall(b"a\xffb\n")
    await output.end()
    assert texts(output.book) == ["a\ufffdb"]


async def test_a_line_without_end_is_cut_into_pieces_and_none_is_lost(output: Output) -> None:
    written = b"x" * (3 * MAX_LINE_BYTES + 5)
    loop = asyncio.get_running_loop()
    output.sock.setblocking(False)
    await loop.sock_sendall(output.sock, written)
    await output.end()
    assert "".join(texts(output.book)) == written.decode()
    assert all(len(text) <= MAX_LINE_BYTES for text in texts(output.book))


@pytest.mark.parametrize("extra", [0, 1, MAX_LINE_BYTES + 3])
async def test_a_long_line_that_ends_is_cut_into_pieces_too(output: Output, extra: int) -> None:
    output.sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(output.sock, b"y" * (MAX_LINE_BYTES + extra) + b"\nnext\n")
    await output.end()
    lines = texts(output.book)
    assert "".join(lines[:-1]) == "y" * (MAX_LINE_BYTES + extra)
    assert lines[-1] == "next"
    assert all(len(text) <= MAX_LINE_BYTES for text in lines)


async def test_closing_twice_is_once(output: Output) -> None:
    output.stream.close()
    output.stream.close()
    assert not output.stream.alive
