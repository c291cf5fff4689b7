"""What commands print: the weights of a function in one cell, a deploy as it proceeds."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import GatewayError
from pilotflame.runtime.command.client.display import (
    _print_folded,
    deploying,
    echo,
    print_answer,
    print_json,
    print_table,
    say,
    snapshots,
    style,
)
from pilotflame.runtime.ground.telemetry.log_files import CONTROL, printable


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"snapshot": "s3://bucket/net", "snapshots": {}}, "s3://bucket/net"),
        ({"snapshot": None, "snapshots": {"base": "/w", "style": "hf://a/b"}}, "base = /w, style = hf://a/b"),
        ({"snapshot": None, "snapshots": {}}, ""),
        # A gateway of an earlier release.
        ({"snapshot": None}, ""),
    ],
)
def test_weights_are_told_by_their_names(found: dict[str, Any], text: str) -> None:
    assert snapshots(found) == text


UPDATE = {"name": "alpha", "replaces": {"number": 4, "deployed_by": "key ci"}}


def test_a_terminal_shows_a_deploy_as_it_proceeds(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with deploying("alpha", "http://here", quiet=False) as show:
        show("function", UPDATE)
        show("step", {"name": "packages", "seconds": None})
        show("step", {"name": "packages", "seconds": 0.314})
        shown = capsys.readouterr().err
    assert "updates alpha (revision 4, deployed by key ci) at http://here\n" in shown
    assert "  packages        0.31 s\n" in shown


def test_a_deploy_that_fails_shows_its_progress_on_terminals_only(capsys) -> None:
    def fail() -> None:
        with deploying("alpha", "http://here", quiet=False) as show:
            show("function", UPDATE)
            raise GatewayError("no")

    with pytest.raises(GatewayError, match="no"):
        fail()
    assert capsys.readouterr().err == ""


HOSTILE = "\x1b]0;title\x07\x1b[2Kgone\r\x9b31m \t\n\x7f\x00ü"


@given(st.lists(st.lists(st.text("a b-1", max_size=12).map(str.strip), min_size=3, max_size=3), max_size=5))
def test_a_table_that_fits_looks_as_one_that_is_folded(rows: list[list[str]]) -> None:
    shown = []
    right = [
        bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        for index in range(3)
    ]
    for show in (
        lambda: print_table(("one", "two", "three"), rows),
        lambda: _print_folded([("one", "two", "three"), *rows], right),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as found:
            show()
        shown.append([line.rstrip() for line in found.getvalue().splitlines()])
    assert shown[0] == shown[1]


@pytest.mark.parametrize("show", [say, echo, lambda text: print_table(["a"], [[text]]), print_answer])
def test_no_control_character_reaches_a_terminal(capsys, monkeypatch, show: Callable[[str], None]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(HOSTILE)
    # Remove the codes for bold text, which the head of a table has.
    told = re.sub(r"\x1b\[[01]m", "", "".join(capsys.readouterr()))
    assert not set(told) & {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0))} - set("\n\t")
    assert "gone" in told
    assert "ü" in told


def test_json_stays_json(capsys) -> None:
    print_json({"text": HOSTILE})
    assert json.loads(printed := capsys.readouterr().out) == {"text": HOSTILE}
    assert "\x9b" not in printed


def test_bytes_are_printed_unchanged_into_a_pipe(capsysbinary) -> None:
    print_answer(HOSTILE.encode())
    assert capsysbinary.readouterr().out == HOSTILE.encode()


@given(st.text(st.characters(codec="utf-8")))
def test_what_has_no_control_characters_is_unchanged(text: str) -> None:
    assert (printable(text) == text) == (not CONTROL.search(text))
    assert not CONTROL.search(printable(text))


def test_a_style_is_shown_on_a_terminal_only(capsys, monkeypatch) -> None:
    echo(style(HOSTILE, bold=True) + " plain", raw=True)
    say(style("dim", dim=True), raw=True)
    told, said = capsys.readouterr()
    assert told.endswith("ü plain\n")
    assert "\x1b" not in told
    assert said == "dim\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    echo(style("x", bold=True), raw=True)
    assert capsys.readouterr().out in ("\x1b[1mx\x1b[0m\n", "x\n")
