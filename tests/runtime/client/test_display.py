"""What commands print: the weights of a function in one cell, a deploy as it proceeds."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.errors import GatewayError
from pilotflame.runtime.client.display import deploying, snapshots


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
    with deploying("alpha", quiet=False) as show:
        show("function", UPDATE)
        show("step", {"name": "packages", "seconds": None})
        show("step", {"name": "packages", "seconds": 0.314})
        shown = capsys.readouterr().err
    assert "updates alpha (revision 4, deployed by key ci)\n" in shown
    assert "  packages        0.31 s\n" in shown


def test_a_deploy_that_fails_shows_its_progress_on_terminals_only(capsys) -> None:
    def fail() -> None:
        with deploying("alpha", quiet=False) as show:
            show("function", UPDATE)
            raise GatewayError("no")

    with pytest.raises(GatewayError, match="no"):
        fail()
    assert capsys.readouterr().err == ""
