"""The error tree: its drawing is complete, codes are unique, and errors cross processes unchanged."""

import json
from collections.abc import Iterator
from pathlib import Path

import pilotflame.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import (
    OF_HANDLERS,
    CallEnded,
    CrashLoop,
    HandlerFailed,
    PilotflameError,
    RevisionReplaced,
    ShuttingDown,
    SnapshotError,
    UnknownFunction,
    for_callers,
    not_whole,
    wrapped,
)
from pilotflame.handlers.failure import explain


def below(kind: type[PilotflameError]) -> Iterator[type[PilotflameError]]:
    for child in kind.__subclasses__():
        if child.__module__ == pilotflame.errors.__name__:
            yield child
            yield from below(child)


KINDS = [PilotflameError, *below(PilotflameError)]


def drawn() -> dict[str, str]:
    """Return each class in the docstring's drawing, with its parent."""
    parents: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in (pilotflame.errors.__doc__ or "").splitlines():
        stem = line.strip(" │├└─")
        if not stem or not (name := stem.split()[0]).isidentifier() or name not in vars(pilotflame.errors):
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4
        above[depth] = name
        if depth - 1 in above:
            parents[name] = above[depth - 1]
            assert len(stem.split()) > 1, f"{name} is drawn without a description"
    return parents


def test_the_drawing_is_the_tree() -> None:
    assert drawn() == {kind.__name__: kind.__base__.__name__ for kind in KINDS[1:] if kind.__base__}


def test_codes_are_unique_and_lowercase() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)
    # A code is never inherited.
    assert all("code" in vars(kind) for kind in KINDS)


def test_each_status_is_the_published_one() -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    rows = (row.split(" | ") for row in page.splitlines() if row.startswith("| `"))
    published = {row[0].strip("|` "): int(row[1]) for row in rows if row[1].isdigit()}
    assert published == {
        kind.code: PilotflameError.from_wire({"type": kind.code}).status for kind in KINDS[1:]
    }


@pytest.mark.parametrize("kind", [RevisionReplaced, ShuttingDown])
def test_what_the_gateway_ended_invites_a_retry_only_where_that_is_harmless(kind: type[CallEnded]) -> None:
    assert (kind("").status, kind("", details={"retry_after_s": 1.0}).status) == (500, 503)
    assert PilotflameError.from_wire(kind("", details={"retry_after_s": 1.0}).to_wire()).status == 503


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_crosses_the_wire_as_itself(kind: type[PilotflameError]) -> None:
    error = kind("It broke.", remedy="Mend it.", details={"line": 3})
    again = PilotflameError.from_wire(json.loads(json.dumps(error.to_wire())))
    assert type(again) is kind
    assert (again.message, again.remedy, again.details) == ("It broke.", "Mend it.", {"line": 3})
    assert str(again) == "It broke. Mend it."
    assert again.args == ("It broke.",)


@pytest.mark.parametrize("kind", [kind for kind in below(SnapshotError) if kind not in OF_HANDLERS])
def test_callers_learn_the_file_of_weights_that_cannot_be_read_and_the_owner_their_place(
    kind: type[PilotflameError],
) -> None:
    place = "s3://hidden/hidden/model.safetensors"
    error = kind(f"{place} is odd.", remedy="See hidden.", details={"object": place, "bucket": "hidden"})
    told = for_callers(error)
    raised = explain(HandlerFailed, "The handler", told, Path("/"))
    stopped = wrapped(CrashLoop, not_whole(error), "It ends: {}".format, details={})
    made = (
        told,
        not_whole(error),
        explain(HandlerFailed, "The handler", error, Path("/")),
        raised,
        stopped,
    )
    for one in (
        PilotflameError.from_wire(json.loads(json.dumps(each.to_wire(private=True)))) for each in made
    ):
        assert "hidden" not in json.dumps(one.to_wire()) + str(one)
        assert f"model.safetensors cannot be read ({kind.code})." in one.message
        whole = one.whole
        assert (type(whole), whole.remedy) == (type(one), "See hidden.")
        assert f"{place} is odd." in whole.message
        assert whole.details["bucket"] == "hidden"
    assert told.whole.to_wire() == error.to_wire()


def test_empty_parts_are_left_out() -> None:
    assert HandlerFailed("no").to_wire() == {"type": "handler_failed", "message": "no"}


@pytest.mark.parametrize("message", ["It broke: 'x'", "It broke: 'x'.", "Did it break?"])
def test_a_sentence_ends_before_the_remedy(message: str) -> None:
    ended = message if message[-1] in ".?" else f"{message}."
    assert str(HandlerFailed(message, remedy="Mend it.")) == f"{ended} Mend it."
    assert str(HandlerFailed(message)) == message


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.dictionaries(st.sampled_from(["type", "message", "remedy", "details"]), JSON))
def test_any_message_of_a_peer_becomes_an_error_that_can_be_printed(wire: dict[str, object]) -> None:
    error = PilotflameError.from_wire(wire)
    assert isinstance(error, PilotflameError)
    str(error)
    error.to_wire()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_may_be_about_something(kind: type[PilotflameError]) -> None:
    error = kind("It broke.", remedy="Mend it.", details={"line": 3, "traceback": "private"})
    named = error.about("snapshots.style")
    assert type(named) is kind
    assert (named.message, named.remedy, named.details) == (
        "snapshots.style: It broke.",
        "Mend it.",
        {"line": 3},
    )
    assert named.trace == "private"
    # A name that the message already has is not added again, and an empty name adds nothing.
    assert named.about("snapshots.style").message == named.message
    assert error.about("") is error


@pytest.mark.parametrize(
    ("known", "meant"),
    [
        ((), ""),
        (("other",), ""),
        (("greeter", "other", "greeters"), "Did you mean 'greeter' or 'greeters'? "),
    ],
)
def test_an_unknown_function_is_told_with_the_closest_known_ones(known: tuple[str, ...], meant: str) -> None:
    error = UnknownFunction.named("greter" + "!" * 100, known)
    assert error.name == ("greter" + "!" * 100)[:64]
    error = UnknownFunction.named("greter", known)
    assert error.message == "There is no function 'greter'."
    assert error.remedy == f"{meant}See `pilotflame list`, or deploy it."
