"""The reference describes every setting, and docs/settings.md is what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.errors import SettingsError
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.ground.settings.reference import all_settings, find_settings, markdown
from pilotflame.runtime.ground.settings.validation import keys

PAGE = Path(__file__).parents[4] / "docs" / "settings.md"


def test_the_page_is_what_is_generated():
    assert PAGE.read_text() == markdown(), "run: pilotflame settings --markdown > docs/settings.md"


def test_every_setting_is_described():
    found = all_settings()
    names = [one.name for one in found if one.scope == "function"]
    assert names == list(keys(FunctionSettings))
    assert [one.variable for one in found if one.scope == "gateway"] == [
        f"PILOTFLAME_{name.upper()}" for name in GatewaySettings.model_fields
    ]
    for one in found:
        assert one.type, one
        assert one.meaning.endswith("."), one
        assert one.range or one.type not in ("number", "whole number"), one


def test_types_ranges_and_defaults():
    def facts(name: str) -> tuple[str, str, str]:
        (one,) = find_settings(name)
        return one.type, one.range, one.default

    assert facts("scale.max") == ("whole number", "1 to 1024", "4")
    assert facts("timeout_s") == ("number", "above 0 to 31536000", "600.0")
    assert facts("threads") == ("whole number", "1 to 1024", "none")
    assert facts("scale.rest") == ('"zygote" or "local"', "", '"zygote"')
    assert facts("PILOTFLAME_STATE_DIR") == ("path", "", "~/.local/state/pilotflame")
    assert facts("PILOTFLAME_MAX_BODY_BYTES") == ("whole number", "1 to 267386880", "20971520 (20 MiB)")
    assert facts("source") == ("list of tables", "at most 100", "[]")


def test_a_table_is_all_its_settings():
    assert [one.name for one in find_settings("scale")] == [
        name for name in keys(FunctionSettings) if name.startswith("scale.")
    ]


@pytest.mark.parametrize(
    ("typo", "meant"), [("sclae", "scale"), ("scale.mx", "scale.max"), ("PILOTFLAME_PROT", "PILOTFLAME_PORT")]
)
def test_an_unknown_name_is_refused_with_the_nearest(typo: str, meant: str):
    with pytest.raises(SettingsError, match=f"did you mean {meant}"):
        find_settings(typo)
