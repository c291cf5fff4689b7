"""What `pilotflame build` prints after a build. The tests in test_image_engine.py build images."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest
from pilotflame.errors import SettingsError
from pilotflame.runtime.plugins.images.command import (
    _checked,
    _labels,
    _told,
    _without_credentials,
    deploy_hint,
)


def test_the_printed_deploy_command_names_the_folder() -> None:
    hint = deploy_hint(Path("my functions/hello"), "localhost/pilotflame/hello@sha256:ab")
    assert (
        "pilotflame deploy 'my functions/hello' --set image.name=localhost/pilotflame/hello@sha256:ab" in hint
    )


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_labels_name_the_commit_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    (tmp_path / "handler.py").write_text("1")
    tag = "registry:5000/hello"
    labels = _labels(tmp_path, tag)
    assert labels == {
        "org.opencontainers.image.created": "1970-01-02T00:00:00Z", "org.opencontainers.image.version": "latest",
    }  # fmt: skip
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    git(tmp_path, "remote", "add", "origin", "https://me:secret@host/repository")
    labels = _labels(tmp_path, f"{tag}:1.0")
    commit = labels["org.opencontainers.image.revision"]
    assert (len(commit), labels["org.opencontainers.image.version"]) == (40, "1.0")
    assert labels["org.opencontainers.image.source"] == "https://host/repository"
    (tmp_path / "handler.py").write_text("2")
    assert _labels(tmp_path, tag)["org.opencontainers.image.revision"] == f"{commit}-dirty"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(SettingsError, match="'soon', which is no Unix time"):
        _labels(tmp_path, tag)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://host/r", "https://host/r"),
        ("https://me@host:8/r?x=1", "https://host:8/r?x=1"),
        ("git@host:r", "git@host:r"),
    ],
)
def test_the_origin_is_told_without_credentials(url: str, told: str) -> None:
    assert _without_credentials(url) == told


def test_a_build_is_told_with_what_is_known() -> None:
    facts = {"tag": "t", "pushed": False, "seconds": 1.5, "size_bytes": 2048, "base": "b@sha256:1"}
    assert _told(facts) == "t is built in 1.5 s, 2.0 KiB\nits base image is b@sha256:1"
    assert _told(facts | {"pushed": True, "size_bytes": None, "base": ""}) == "t is pushed in 1.5 s"


@pytest.mark.parametrize("tag", ["", "-x", "a b", "Hello", "a" * 600])
def test_a_name_that_no_image_can_have_is_refused(tag: str) -> None:
    assert _checked("registry.example:5000/Hello_1:1.0") == "registry.example:5000/Hello_1:1.0"
    with pytest.raises(click.BadParameter, match="is not a name such as"):
        _checked(tag)
