"""The table of schemes: the contract of every row. A new scheme gets these tests with its row."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from pilotflame.snapshot.sources.locate import is_remote, split_file
from pilotflame.snapshot.sources.realm import realm_of
from pilotflame.snapshot.sources.schemes import SCHEMES, scheme_of
from pilotflame.snapshot.sources.source import Source
from pilotflame.snapshot.sources.variables import FAMILIES

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
METHODS = [name for name, member in vars(Source).items() if callable(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row(name: str) -> None:
    scheme, url = SCHEMES[name], f"{name}://place/folder"
    assert (scheme_of(url), is_remote(url)) == (scheme, True)
    assert split_file(f"{url}/model.safetensors") == (url, "model.safetensors")
    module, _, kind = scheme.opener.partition(":")
    opened = getattr(import_module(f"pilotflame.snapshot.{module}"), kind)
    assert [method for method in METHODS if not callable(getattr(opened, method, None))] == []
    # Its secrets are kept from other sources, and are a part of the realm.
    assert set(scheme.identity.families) <= set(FAMILIES)
    assert realm_of(url) != ""
    for beginning in scheme.identity.families:
        assert realm_of(url, {f"{beginning}TOKEN": "one"}) != realm_of(url)
    # Other places are other realms.
    assert realm_of(f"{name}://elsewhere/folder") != realm_of(url)
    assert not scheme.extra or scheme.extra in EXTRAS


@pytest.mark.parametrize("path", ["/srv/models", "models", "s3:/bucket", "C:\\models", "ftp://host/x", "s3"])
def test_what_has_no_row_is_a_path(path: str) -> None:
    assert (scheme_of(path), is_remote(path), realm_of(path)) == (None, False, "")
