"""The `[[source]]` table of a topic: what it may hold, and that every mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.errors import SettingsError
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings, read_settings

TABLE = '[[source]]\ntype = "kafka"\nbrokers = ["one:9092", "[::1]:9093"]\ntopic = "orders"\ngroup = "g"\n'


def read(folder: Path, text: str) -> FunctionSettings:
    (folder / "pilotflame.toml").write_text(text)
    return read_settings(folder, overrides={"name": "f"})


def test_a_table_is_a_source(tmp_path: Path) -> None:
    found = read(tmp_path, f'{TABLE}result = "done"\n')
    (source,) = found.source
    assert (source.queue_name, source.address) == ("orders", "kafka://one:9092,[::1]:9093/orders")
    assert source.addresses == {
        "topic": "kafka://one:9092,[::1]:9093/orders",
        "result": "kafka://one:9092,[::1]:9093/done",
    }
    assert FunctionSettings.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('brokers = ["one"]', "source.brokers has 'one'"),
        ("brokers = []", "source.0.brokers"),
        ('topic = "a/b"', "'a/b' is no topic"),
        ('topic = ".."', "'..' is no topic"),
        ('group = ""', "source.0.group"),
        ('result = "kafka://x"', "'kafka://x' is no topic"),
        ("max_deliveries = 0", "source.0.max_deliveries is 0"),
        ('mechanism = "GSSAPI"', "source.0.mechanism is 'GSSAPI'"),
        ('deadletters = "x"', "did you mean source.dead_letters"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, line: str, named: str) -> None:
    key = line.partition(" ")[0]
    kept = "\n".join(one for one in TABLE.splitlines() if not one.startswith(f"{key} "))
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, f"{kept}\n{line}\n")
    assert named in str(raised.value)
