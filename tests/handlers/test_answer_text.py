"""The pieces of a text make the whole text and end before a stop string, whatever the borders of the tokens are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.answer_text import MOST_HELD, TextStream, token_text

TEXTS = st.text(alphabet="abcé€😀 \n", max_size=40)
STOPS = st.lists(st.text(alphabet="abcé€", min_size=1, max_size=4), max_size=3)


def decode(tokens: list[int]) -> str:
    """Decode tokens, each of which is a byte."""
    return bytes(tokens).decode(errors="replace")


def pieces(text: str, stops: list[str], *, with_stop: bool = False) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops, with_stop=with_stop)
    found = []
    for token in text.encode():
        found.append(stream.push(token))
        if stream.stopped is not None:
            break
    found.append(stream.finish())
    return found, stream


@given(TEXTS)
def test_pieces_make_the_text_and_no_piece_has_half_a_character(text: str) -> None:
    found, _ = pieces(text, [])
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found)


@given(TEXTS, STOPS, st.booleans())
def test_a_text_ends_at_its_first_stop_string(text: str, stops: list[str], with_stop: bool) -> None:
    found, stream = pieces(text, stops, with_stop=with_stop)
    places = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not places:
        assert "".join(found) == text
        return
    # The first stop string that is complete ends the text.
    end = min(place for place, _ in places)
    assert stream.stopped in {stop for place, stop in places if place == end}
    assert stream.stopped is not None
    assert "".join(found) == text[: end if with_stop else end - len(stream.stopped)]


def test_a_piece_is_not_held_longer_than_a_stop_string_needs() -> None:
    stream = TextStream(decode, ["END"])
    assert [stream.push(token) for token in b"aEbENx"] == ["a", "", "Eb", "", "", "ENx"]


def test_a_space_that_a_token_has_only_after_another_one_is_kept() -> None:
    words = ["The", "sky"]

    def joined(tokens: list[int]) -> str:
        return " ".join(words[token] for token in tokens)

    assert TextStream(joined, after=[0]).push(1) == " sky"
    assert TextStream(joined).push(1) == "sky"


def test_tokens_without_text_are_decoded_a_bounded_number_of_times() -> None:
    decoded = 0

    def silent(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return "".join("x" for token in tokens if token)

    stream = TextStream(silent)
    assert all(stream.push(0) == "" for _ in range(1000))
    assert decoded < 1000 * 3 * MOST_HELD
    assert stream.push(1) == "x"


def test_half_a_character_at_the_end_is_left_out() -> None:
    stream = TextStream(decode)
    assert [stream.push(token) for token in "aä".encode()[:2]] == ["a", ""]
    assert stream.finish() == ""


def test_bytes_that_are_no_character_do_not_hold_up_the_text() -> None:
    stream = TextStream(decode)
    found = [stream.push(0x80) for _ in range(MOST_HELD)]
    assert found[-1] == "\ufffd" * MOST_HELD


def test_a_character_whose_first_bytes_end_the_prompt_is_whole() -> None:
    prompt, answer = "aé火".encode()[:-2], "火b".encode()[1:]
    stream = TextStream(decode, after=list(prompt))
    assert [stream.push(token) for token in answer] == ["", "火", "b"]
    # The incomplete or replaced character at the end of the prompt is no part of the answer.
    for prompt in ("a\ufffd".encode(), "a火".encode()[:-1]):
        stream = TextStream(decode, after=list(prompt))
        assert stream.push(ord("b")) == "b"
        assert stream.push(ord("c")) == "c"


@given(TEXTS, STOPS, st.integers(0, 12))
def test_a_stop_string_that_the_first_tokens_end_is_ignored(text: str, stops: list[str], least: int) -> None:
    stream, found, tokens = TextStream(decode, stops, least=least), "", text.encode()
    for token in tokens:
        found += stream.push(token)
        if stream.stopped is not None:
            break
    found += stream.finish()
    ends = {
        number
        for number in range(least + 1, len(tokens) + 1)
        if any(tokens[:number].endswith(stop.encode()) for stop in stops)
    }
    if not ends:
        assert (found, stream.stopped) == (text, None)
    else:
        assert stream.stopped is not None
        assert found + stream.stopped == tokens[: min(ends)].decode()


@given(TEXTS)
def test_the_texts_of_tokens_make_the_text(text: str) -> None:
    """As in vLLM, a character belongs to its last token."""
    tokens = list(text.encode())
    found = [token_text(decode, tokens[:number], token) for number, token in enumerate(tokens)]
    assert "".join(found) == text
    assert all(not one or one in text for one in found)
    assert token_text(decode, [], 0x80) == ""
