"""Duties of a gateway that is alone, and of one of several."""

from __future__ import annotations

from pilotflame.runtime.ground.storing.duties import Duties, SharedDuties


def test_a_gateway_that_is_alone_has_all_duties() -> None:
    duties, told = Duties(), list[bool]()
    duties.keep("webhooks", told.append)
    assert told == [True]
    assert duties.has("webhooks")
    duties.drop("webhooks")
    assert not duties.shared


def test_a_shared_duty_begins_and_ends_with_what_is_noted() -> None:
    duties, told = SharedDuties(lambda: True), list[tuple[str, bool]]()
    for name in ("a", "b"):
        duties.keep(name, lambda mine, name=name: told.append((name, mine)))
    assert (told, duties.names, duties.has("a")) == ([], ("a", "b"), False)
    duties.note(["a", "unknown"])
    duties.note(["a"])
    assert (told, duties.has("a"), duties.has("unknown")) == ([("a", True)], True, False)
    duties.note(["b"])
    assert told[1:] == [("a", False), ("b", True)]
    assert duties.shared


def test_a_duty_that_is_kept_anew_is_told_again() -> None:
    duties, told = SharedDuties(lambda: True), list[str]()
    duties.keep("a", lambda _mine: told.append("first"))
    duties.note(["a"])
    duties.keep("a", lambda _mine: told.append("second"))
    duties.note([])
    assert told == ["first", "second", "second"]


def test_a_dropped_duty_is_not_told() -> None:
    duties, told = SharedDuties(lambda: True), list[bool]()
    duties.keep("a", told.append)
    duties.note(["a"])
    duties.drop("a")
    duties.note([])
    assert (told, duties.names, duties.has("a")) == ([True], (), False)


def test_a_gateway_that_ends_takes_no_duty() -> None:
    duties, told = SharedDuties(lambda: True), list[bool]()
    duties.keep("a", told.append)
    duties.note(["a"])
    duties.close()
    duties.note(["a"])
    assert (told, duties.names, duties.has("a")) == ([True], (), False)


def test_without_a_lease_a_gateway_has_no_duty() -> None:
    alive = True
    duties, told = SharedDuties(lambda: alive), list[bool]()
    duties.keep("a", told.append)
    duties.note(["a"])
    alive = False
    assert not duties.has("a")
    duties.keep("a", told.append)
    assert told == [True]
