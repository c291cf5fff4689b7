"""Logins for registries: where docker and podman keep them, which one is used if there are several, and what cannot be used."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import SourceError
from pilotflame.snapshot.registries.login import Login, find_login
from pilotflame.snapshot.sources.access import Access

HUSH = "hush:with:colons"


def entry(user: str = "ann", password: str = HUSH) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def found(document: Any, registry: str = "ghcr.io", repository: str = "org/net") -> Login:
    text = document if isinstance(document, str) else json.dumps(document)
    return find_login(registry, repository, {"DOCKER_AUTH_CONFIG": text}, Access(own_only=True))


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DOCKER_AUTH_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "podman"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("ghcr.io", "ghcr.io"), ("https://ghcr.io", "ghcr.io"), ("https://ghcr.io/v2/", "ghcr.io"),
        ("https://index.docker.io/v1/", "docker.io"), ("docker.io", "docker.io"), ("host:5000", "host:5000"),
    ],
)  # fmt: skip
def test_an_entry_is_found_by_the_registry(key: str, registry: str) -> None:
    login = found({"auths": {key: entry(), "other": entry("bob")}}, registry)
    assert (login.user, login.password) == ("ann", HUSH)
    assert login.basic()["Authorization"].startswith("Basic ")
    assert HUSH not in repr(login)


def test_the_entry_of_the_longest_path_counts() -> None:
    auths = {"ghcr.io": entry("all"), "ghcr.io/org": entry("org"), "ghcr.io/org/net": entry("net")}
    users = [
        found({"auths": auths}, repository=name).user
        for name in ("org/net", "org/other", "me/net", "org/net/x")
    ]
    assert users == ["net", "org", "all", "net"]


def test_a_token_for_the_registry_needs_no_user() -> None:
    login = found({"auths": {"ghcr.io": {"registrytoken": "abc"}}})
    assert (login.token, login.basic()) == ("abc", {})


@pytest.mark.parametrize("document", [{}, {"auths": {}}, {"auths": {"ghcr.io": {}}}, {"auths": []}])
def test_without_an_entry_requests_are_anonymous(document: Any) -> None:
    login = found(document)
    assert (login.user, login.token, login.basic()) == ("", "", {})
    assert "without a login" in login.origin


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (HUSH, "not an auth file"), ("[" * 100_000, "not an auth file"), ("[]", "not an auth file"),
        ({"auths": {"ghcr.io": {"auth": "%%%"}}}, "not base64"),
        ({"auths": {"ghcr.io": {"identitytoken": HUSH}}}, "identity token"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_without_its_text(document: Any, fault: str) -> None:
    with pytest.raises(SourceError, match=fault) as caught:
        found(document)
    assert HUSH not in f"{caught.value}"


def test_a_helper_that_the_file_names_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    helper = tmp_path / "docker-credential-tests"
    helper.write_text("""#!/bin/sh
read server
[ "$server" = ghcr.io ] || exit 1
echo '{"ServerURL": "ghcr.io", "Username": "helped", "Secret": "hush"}'
""")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "docker"
    folder.mkdir()
    auths = {"ghcr.io": entry("in the file"), "other": entry("in the file")}
    (folder / "config.json").write_text(json.dumps({"auths": auths, "credsStore": "tests"}))
    users = [find_login(name, "net", {}, Access()).user for name in ("ghcr.io", "other")]
    assert users == ["helped", "in the file"]
    # A secret of a function must not make this process run a program.
    secret = {"DOCKER_AUTH_CONFIG": (folder / "config.json").read_text()}
    assert find_login("ghcr.io", "net", secret, Access()).user == "in the file"
    assert find_login("ghcr.io", "net", {}, Access(own_only=True)).user == ""
