"""The `[[source]]` table: what it may hold, and that every mistake is named."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pilotflame.entry_points import offers
from pilotflame.errors import SettingsError
from pilotflame.runtime.ground.settings import event_source
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings, read_settings

URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"


def read(folder: Path, text: str) -> FunctionSettings:
    (folder / "pilotflame.toml").write_text(text)
    return read_settings(folder, overrides={"name": "f"})


def test_a_table_is_a_source(tmp_path: Path) -> None:
    found = read(tmp_path, f'[[source]]\ntype = "sqs"\nqueue = "{URL}"\nresult = "s3://bucket/x"\n')
    [source] = found.source
    assert (source.queue_name, source.region_name, source.sqs_endpoint) == ("orders", "eu-west-1", None)
    assert FunctionSettings.model_validate_json(found.model_dump_json()) == found
    assert read(tmp_path, "").source == ()


def test_a_queue_of_another_host_is_its_own_endpoint(tmp_path: Path) -> None:
    text = '[[source]]\ntype = "sqs"\nqueue = "http://127.0.0.1:4566/000000000000/orders.fifo"\n'
    [source] = read(tmp_path, text).source
    assert source.sqs_endpoint == "http://127.0.0.1:4566"
    assert source.region_name is None
    [source] = read(tmp_path, text + 'endpoint_url = "http://other"\nregion = "here"\n').source
    assert (source.sqs_endpoint, source.region_name) == ("http://other", "here")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("concurrency = 0", "source.0.concurrency is 0; it should be greater than or equal to 1"),
        ('results = "x"', "did you mean source.result"),
        ("visibility_s = 60", "source.visibility_s no longer exists; remove it"),
        ('result = "ftp://x"', "source.result"),
        ('result = "sqs://a/b"', "source.result"),
        ('endpoint_url = "http://user:hush@host"', "it must not have a user"),
        ('type = "rabbit"', "source.0.type is 'rabbit'; it should be "),
        ('queue = "orders"', "source.queue is not a queue's URL"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, line: str, named: str) -> None:
    kept = [
        text for text in ('type = "sqs"', f'queue = "{URL}"') if text.split()[0] != line.split(maxsplit=1)[0]
    ]
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, "\n".join(["[[source]]", *kept, line]))
    assert named in str(raised.value)
    assert "hush" not in str(raised.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"source\.0\.queue is missing"):
        read(tmp_path, '[[source]]\ntype = "sqs"\n')
    with pytest.raises(SettingsError, match="source is 'x'; it should be a list of tables"):
        read(tmp_path, 'source = "x"\n')


def test_a_plugin_that_cannot_be_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = EntryPoint("gone", "no_such_module:Source", "pilotflame.sources")
    monkeypatch.setattr(event_source, "offers", lambda group: {**offers(group), "gone": gone})
    event_source.source_kinds.cache_clear()
    try:
        assert list(event_source.source_kinds()) == ["kafka", "sqs"]
        assert "'gone' cannot be loaded from no_such_module:Source" in caplog.text
    finally:
        event_source.source_kinds.cache_clear()
