"""What commands print: the weights of a function in one cell."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.runtime.commands.display import snapshots


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
