"""Secrets outlive the process, only their owner can read them, and messages never quote them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from pilotflame.errors import BadInput, GatewayError, SettingsError, UnknownSecret
from pilotflame.runtime.ground.access.keyring import ACCESS
from pilotflame.runtime.ground.access.secrets import MAX_SECRETS, MAX_VALUE_BYTES, Secrets, SecretsFile
from pilotflame.runtime.ground.storing.file_documents import FileDocuments

VALUE = "s3cr3t-välue\n with lines"


def loaded(state: Path) -> Secrets:
    documents = FileDocuments(state)
    documents.remove_leftovers(ACCESS)
    secrets = Secrets(documents)
    secrets.load()
    return secrets


def test_secrets_outlive_the_process(tmp_path: Path):
    secrets = loaded(tmp_path)
    assert secrets.set("f", "TOKEN", "old") is False
    assert secrets.set("f", "TOKEN", VALUE) is True
    secrets.set("g", "TOKEN", "g's")
    again = loaded(tmp_path)
    assert again.of("f") == {"TOKEN": VALUE}
    assert again.of("g") == {"TOKEN": "g's"}
    assert again.of("h") == {}
    assert list(again.of("f")) == ["TOKEN"]


def test_files_are_their_owners(tmp_path: Path):
    loaded(tmp_path).set("f", "TOKEN", VALUE)
    [path] = (tmp_path / "access" / "secrets").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_unset_and_forgotten_ones_leave_nothing(tmp_path: Path):
    secrets = loaded(tmp_path)
    secrets.set("f", "A", "1")
    secrets.set("f", "B", "2")
    secrets.set("g", "A", "3")
    secrets.unset("f", "A")
    assert loaded(tmp_path).of("f") == {"B": "2"}
    with pytest.raises(UnknownSecret, match="'A'"):
        secrets.unset("f", "A")
    secrets.forget("f")
    secrets.forget("never-there")
    assert secrets.of("f") == loaded(tmp_path).of("f") == {}
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


def test_messages_about_limits_do_not_quote_the_value(tmp_path: Path):
    secrets = loaded(tmp_path)
    for value in ("x" * (MAX_VALUE_BYTES + 1), "xx\0xx"):
        with pytest.raises(BadInput) as caught:
            secrets.set("f", "A", value)
        assert "xx" not in str(caught.value)
    full = SecretsFile(secrets={f"K{number}": "" for number in range(MAX_SECRETS)})
    FileDocuments(tmp_path).put("access/secrets/f.json", full.model_dump_json().encode())
    assert secrets.set("f", "K1", "1") is True
    with pytest.raises(BadInput, match="100 secrets"):
        secrets.set("f", "A", "1")


@pytest.mark.parametrize("text", ["", VALUE, f'{{"secrets": {{"A": 1, "B": "{VALUE[:6]}"}}}}'])
def test_messages_about_a_damaged_file_do_not_quote_it(tmp_path: Path, text: str):
    loaded(tmp_path).set("f", "A", VALUE)
    (tmp_path / "access" / "secrets" / "f.json").write_text(text)
    with pytest.raises(GatewayError, match=r"f\.json") as caught:
        loaded(tmp_path)
    assert "s3cr3t" not in repr(caught.value) + repr(caught.value.details)


def test_half_written_files_are_removed(tmp_path: Path):
    loaded(tmp_path).set("f", "A", VALUE)
    leftover = tmp_path / "access" / "secrets" / ".f.json.abcd"
    leftover.write_text(VALUE)
    assert loaded(tmp_path).of("f") == {"A": VALUE}
    assert not leftover.exists()


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secrets = loaded(tmp_path)
    secrets.set("f", "A", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(GatewayError, match="No space left"):
            secrets.set("f", "A", "new")
    assert secrets.of("f") == loaded(tmp_path).of("f") == {"A": "old"}


def test_what_is_given_away_is_a_copy(tmp_path: Path):
    secrets = loaded(tmp_path)
    secrets.set("f", "A", "1")
    secrets.of("f")["A"] = "2"
    assert secrets.of("f") == {"A": "1"}


def two_gateways(state: Path) -> tuple[Secrets, Secrets]:
    documents = FileDocuments(state)
    return Secrets(documents), Secrets(documents)


def test_two_gateways_lose_no_secret_of_each_other(tmp_path: Path):
    one, other = two_gateways(tmp_path)
    one.set("f", "A", "1")
    assert other.set("f", "B", "2") is False
    assert other.set("f", "A", "3") is True
    one.set("f", "C", "4")
    assert one.of("f") == loaded(tmp_path).of("f") == {"A": "3", "B": "2", "C": "4"}
    other.unset("f", "C")
    with pytest.raises(UnknownSecret):
        one.unset("f", "C")
    one.set("f", "D", "5")
    assert loaded(tmp_path).of("f") == {"A": "3", "B": "2", "D": "5"}


def test_a_forgotten_function_gets_no_secrets_back_from_another_gateway(tmp_path: Path):
    one, other = two_gateways(tmp_path)
    one.set("f", "A", "old")
    other.load()
    one.forget("f")
    other.set("f", "B", "new")
    assert other.of("f") == loaded(tmp_path).of("f") == {"B": "new"}
    one.set("g", "A", "1")
    other.forget("f")
    one.load()
    other.load()
    assert (one.of("f"), other.of("g")) == ({}, {"A": "1"})


def test_damaged_secrets_are_not_replaced_but_may_be_forgotten(tmp_path: Path):
    secrets, file = loaded(tmp_path), tmp_path / "access" / "secrets" / "f.json"
    secrets.set("f", "A", "1")
    file.write_text("{")
    with pytest.raises(GatewayError, match=r"f\.json is damaged"):
        secrets.set("f", "B", "2")
    assert file.read_text() == "{"
    secrets.forget("f")
    assert not file.exists()


def test_files_of_other_names_are_no_secrets(tmp_path: Path):
    loaded(tmp_path).set("f", "A", "1")
    for name in ("F.json", "f", "g", "f.json.json", "models.json", "f.json.bak"):
        (tmp_path / "access" / "secrets" / name).write_text("{")
    assert loaded(tmp_path)._secrets == {"f": {"A": "1"}}


def test_what_a_newer_version_has_stored_is_kept(tmp_path: Path):
    secrets, file = loaded(tmp_path), tmp_path / "access" / "secrets" / "f.json"
    secrets.set("f", "A", "1")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"more": {"A": 1}}))
    older = loaded(tmp_path)
    older.set("f", "B", "2")
    assert json.loads(file.read_text()) == {"version": 1, "secrets": {"A": "1", "B": "2"}, "more": {"A": 1}}


def test_a_damaged_document_keeps_no_other_function_from_its_secrets(tmp_path: Path):
    one, other = two_gateways(tmp_path)
    for function in ("f", "g"):
        one.set(function, "A", "1")
    other.load()
    (tmp_path / "access" / "secrets" / "f.json").write_text("{")
    one.set("g", "A", "2")
    one.set("h", "A", "3")
    changed, [error] = other.reload()
    assert changed == {"g", "h"}
    assert "f.json is damaged" in str(error)
    assert [other.of(function) for function in "fgh"] == [{"A": "1"}, {"A": "2"}, {"A": "3"}]
    one.forget("f")
    assert other.reload() == ({"f"}, [])
    assert other.of("f") == {}
