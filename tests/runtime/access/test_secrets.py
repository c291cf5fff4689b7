"""The vault: secrets outlive the process, for their owner's eyes, and never appear in what is said about them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from pilotflame.errors import BadInput, GatewayError, SettingsError, UnknownSecret
from pilotflame.runtime.access.secrets import MAX_SECRETS, MAX_VALUE_BYTES, Secrets

VALUE = "s3cr3t-välue\n with lines"


def loaded(state: Path) -> Secrets:
    vault = Secrets(state)
    vault.load()
    return vault


def test_secrets_outlive_the_process(tmp_path: Path):
    vault = loaded(tmp_path)
    assert vault.set("f", "TOKEN", "old") is False
    assert vault.set("f", "TOKEN", VALUE) is True
    vault.set("g", "TOKEN", "g's")
    again = loaded(tmp_path)
    assert again.of("f") == {"TOKEN": VALUE}
    assert again.of("g") == {"TOKEN": "g's"}
    assert again.of("h") == {}
    assert again.names("f") == ["TOKEN"]


def test_files_are_their_owners(tmp_path: Path):
    loaded(tmp_path).set("f", "TOKEN", VALUE)
    [path] = (tmp_path / "access" / "secrets").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_unset_and_forgotten_ones_leave_nothing(tmp_path: Path):
    vault = loaded(tmp_path)
    vault.set("f", "A", "1")
    vault.set("f", "B", "2")
    vault.set("g", "A", "3")
    vault.unset("f", "A")
    assert loaded(tmp_path).of("f") == {"B": "2"}
    with pytest.raises(UnknownSecret, match="'A'"):
        vault.unset("f", "A")
    vault.forget("f")
    vault.forget("never-there")
    assert vault.of("f") == loaded(tmp_path).of("f") == {}
    assert [path.name for path in (tmp_path / "access" / "secrets").iterdir()] == ["g.json"]


@pytest.mark.parametrize("key", ["", "1A", "A-B", "A B", "A=B", "Ä", "A" * 256, "../A"])
def test_a_name_must_be_a_variables(tmp_path: Path, key: str):
    with pytest.raises(BadInput, match="secret's name"):
        loaded(tmp_path).set("f", key, VALUE)


@pytest.mark.parametrize("function", ["", "../f", "F", "models"])
def test_a_function_must_have_a_functions_name(tmp_path: Path, function: str):
    with pytest.raises(SettingsError):
        loaded(tmp_path).set(function, "A", VALUE)
    with pytest.raises(SettingsError):
        loaded(tmp_path).forget(function)


def test_limits_are_told_without_the_value(tmp_path: Path):
    vault = loaded(tmp_path)
    for value in ("x" * (MAX_VALUE_BYTES + 1), "xx\0xx"):
        with pytest.raises(BadInput) as told:
            vault.set("f", "A", value)
        assert "xx" not in str(told.value)
    for number in range(MAX_SECRETS):
        vault._secrets.setdefault("f", {})[f"K{number}"] = ""
    with pytest.raises(BadInput, match="100 secrets"):
        vault.set("f", "A", "1")


@pytest.mark.parametrize("text", ["", VALUE, f'{{"secrets": {{"A": 1, "B": "{VALUE[:6]}"}}}}'])
def test_a_broken_file_is_told_without_what_is_in_it(tmp_path: Path, text: str):
    loaded(tmp_path).set("f", "A", VALUE)
    (tmp_path / "access" / "secrets" / "f.json").write_text(text)
    with pytest.raises(GatewayError, match=r"f\.json") as told:
        loaded(tmp_path)
    assert "s3cr3t" not in repr(told.value) + repr(told.value.details)


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path):
    loaded(tmp_path).set("f", "A", VALUE)
    leftover = tmp_path / "access" / "secrets" / ".f.json.abcd"
    leftover.write_text(VALUE)
    assert loaded(tmp_path).of("f") == {"A": VALUE}
    assert not leftover.exists()


def test_what_cannot_be_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vault = loaded(tmp_path)
    vault.set("f", "A", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(GatewayError, match="No space left"):
            vault.set("f", "A", "new")
    assert vault.of("f") == loaded(tmp_path).of("f") == {"A": "old"}


def test_what_is_given_away_is_a_copy(tmp_path: Path):
    vault = loaded(tmp_path)
    vault.set("f", "A", "1")
    vault.of("f")["A"] = "2"
    assert vault.of("f") == {"A": "1"}
