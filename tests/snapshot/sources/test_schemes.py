"""The table of schemes: the contract of every row. A new scheme gets these tests with its row."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from pilotflame.addresses import Addresses
from pilotflame.errors import SourceDenied
from pilotflame.snapshot.sources.access import Access
from pilotflame.snapshot.sources.locate import is_remote, split_file
from pilotflame.snapshot.sources.realm import realm_of
from pilotflame.snapshot.sources.schemes import SCHEMES, bucket, model, parent, repository, scheme_of
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
    # The secrets of the scheme are kept from other sources, and are a part of the realm.
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


@pytest.mark.parametrize(
    ("place", "url", "found"),
    [
        (bucket, "s3://b/p/q", "s3://b"),
        (bucket, "s3://arn:aws:s3:r:1:accesspoint/n/p", "s3://arn:aws:s3:r:1:accesspoint/n"),
        (bucket, "hf://org/repo", "hf://org"),
        (parent, "https://h:1/a/b/?k=1", "https://h:1/a?k=1"),
        (parent, "https://h/a", "https://h/a?"),
        (repository, "oci://r:5000/a/b:v1/folder", "oci://r:5000/a/b"),
        (repository, "oci://r/a@sha256:12", "oci://r/a"),
        (model, "mlflow://net/3/model", "mlflow://net"),
        (model, "mlflow://net@production", "mlflow://net"),
    ],
)
def test_the_place_of_a_url_is_what_its_credentials_open(place: object, url: str, found: str) -> None:
    assert callable(place)
    assert place(url) == found


@pytest.mark.parametrize("name", ["gs", "az"])
def test_a_function_with_limits_may_not_use_a_client_whose_connections_are_not_checked(name: str) -> None:
    with pytest.raises(SourceDenied, match=f"{name}://"):
        SCHEMES[name].open(f"{name}://place/folder", {}, Access(addresses=Addresses(), own_only=True))


def test_the_own_variables_of_a_function_are_those_of_its_source_and_where_it_leads() -> None:
    secrets = {"AWS_A": "1", "HF_TOKEN": "2", "MLFLOW_B": "3", "OTHER": "4"}
    assert SCHEMES["s3"].own(secrets) == {"AWS_A": "1"}
    assert SCHEMES["mlflow"].own(secrets) == {"AWS_A": "1", "HF_TOKEN": "2", "MLFLOW_B": "3"}
