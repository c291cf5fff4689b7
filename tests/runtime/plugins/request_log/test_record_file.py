"""Files of records: lines of JSON and Parquet have the same records; Parquet has typed columns and small row groups."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

import orjson
import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import PackageMissing
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd
from pilotflame.runtime.ground.telemetry.timeline import Timeline
from pilotflame.runtime.plugins.request_log import record_file
from pilotflame.runtime.plugins.request_log.record_file import FILES, ParquetFile
from pilotflame.runtime.plugins.request_log.records import LoggedCall, Redactor, record_of
from pyarrow import parquet

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
RECORDS = st.fixed_dictionaries(
    {
        "at": st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC)).map(  # noqa: DTZ001
            lambda at: at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        ),
        "function": TEXTS,
        "revision": TEXTS,
        "request_id": TEXTS,
        "source": st.sampled_from(["http", "job", "queue", "batch"]),
        "status": st.integers(200, 599),
        "error": st.none() | TEXTS,
        "seconds": st.floats(0, 1e6),
        "input_bytes": st.integers(0, 2**40),
        "output_bytes": st.none() | st.integers(0, 2**40),
        "input": VALUES,
        "output": VALUES,
    }
)


def content_of(format_: str, records: list[dict[str, Any]]) -> bytes:
    file = FILES[format_]()
    for record in records:
        file.add(record)
    return file.content()


def table_of(content: bytes) -> Any:
    return parquet.read_table(arrow.BufferReader(content))


def record_in(row: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a row of a Parquet file."""
    texts = {name: None if row[name] is None else json.loads(row[name]) for name in ("input", "output")}
    return {**row, **texts, "at": row["at"].isoformat(timespec="milliseconds").replace("+00:00", "Z")}


@given(st.lists(RECORDS, max_size=5))
def test_both_formats_have_the_same_records(records: list[dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in content_of("jsonl", records).splitlines()]
    table = table_of(content_of("parquet", records))
    assert lines == records
    assert [record_in(row) for row in table.to_pylist()] == records
    assert table.schema.field("at").type == arrow.timestamp("ms", "UTC")
    assert {str(table.schema.field(name).type) for name in ("input", "output", "error")} == {"string"}


def test_a_row_group_ends_when_its_records_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "ROW_GROUP_BYTES", 10_000)
    record = record_of(LoggedCall.of(ended(b'"%s"' % (b"x" * 3000))), Redactor(()))
    metadata = parquet.ParquetFile(arrow.BufferReader(content_of("parquet", [record] * 10))).metadata
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [4, 4, 2]


@pytest.mark.parametrize("format_", list(FILES))
@pytest.mark.parametrize("depth", [300, 1000])
def test_json_that_is_nested_too_deeply_is_left_out(format_: str, depth: int) -> None:
    body = b'{"password":' * depth + b"1" + b"}" * depth
    content = content_of(format_, [record_of(LoggedCall.of(ended(b"2", body)), Redactor(["secret"]))])
    record = orjson.loads(content) if format_ == "jsonl" else record_in(*table_of(content).to_pylist())
    assert record["output_bytes"] == len(body)
    assert record["output"] is None


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PackageMissing, match="parquet") as raised:
        ParquetFile()
    assert "pip install 'pilotflame[parquet]'" in raised.value.remedy


class Request:
    content_type = ""

    def __init__(self, body: bytes) -> None:
        self.body = body


def ended(body: bytes, output: bytes = b"1") -> InvocationEnd:
    return InvocationEnd("tone", "r1", "q1", "http", Timeline(0.0), call=Request(body), output=(output, ""))
