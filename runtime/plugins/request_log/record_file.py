"""Puts the records of a batch into one file: lines of JSON, or Parquet."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

import orjson

from ....snapshot.extras import needs

ROW_GROUP_BYTES = 4 << 20
"""A row group of a Parquet file ends when its inputs and outputs have this size, so that few records are in memory twice."""
ROW_BYTES = 128
"""About the size of a row without input and output."""


class RecordFile(Protocol):
    """A file in memory. Its methods block for milliseconds."""

    def add(self, record: dict[str, Any]) -> None:
        """Add a record. Inputs and outputs that are nested too deeply for orjson are left out."""

    def content(self) -> bytes:
        """Return the bytes of the file. No record can be added after this."""


class JsonLines:
    """One line of JSON for each record."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def add(self, record: dict[str, Any]) -> None:
        try:
            line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            line = orjson.dumps({**record, "input": None, "output": None}, option=orjson.OPT_APPEND_NEWLINE)
        self._lines.append(line)

    def content(self) -> bytes:
        return b"".join(self._lines)


class ParquetFile:
    """One row for each record. Input and output are texts of JSON."""

    def __init__(self) -> None:
        """Import pyarrow, which takes time at first. Raise PackageMissing if it is not installed."""
        with needs('request_log.format = "parquet"', "pyarrow"):
            import pyarrow as arrow  # noqa: PLC0415  only functions with Parquet need it
            from pyarrow import parquet  # noqa: PLC0415
        text, size = arrow.string(), arrow.int64()
        types = {
            "at": arrow.timestamp("ms", "UTC"), "function": text, "revision": text, "request_id": text,
            "source": text, "status": arrow.int32(), "error": text, "seconds": arrow.float64(),
            "input_bytes": size, "output_bytes": size, "input": text, "output": text,
        }  # fmt: skip
        self._schema = arrow.schema(types)
        self._batch_of = arrow.RecordBatch.from_pylist
        self._target = arrow.BufferOutputStream()
        self._writer = parquet.ParquetWriter(self._target, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def add(self, record: dict[str, Any]) -> None:
        row = {
            **record, "at": datetime.fromisoformat(record["at"]),
            "input": _text_of(record["input"]), "output": _text_of(record["output"]),
        }  # fmt: skip
        self._rows.append(row)
        self._size += ROW_BYTES + len(row["input"] or "") + len(row["output"] or "")
        if self._size >= ROW_GROUP_BYTES:
            self._end_row_group()

    def content(self) -> bytes:
        self._end_row_group()
        self._writer.close()
        content: bytes = self._target.getvalue().to_pybytes()
        return content

    def _end_row_group(self) -> None:
        if self._rows:
            self._writer.write_batch(self._batch_of(self._rows, schema=self._schema))
            self._rows, self._size = [], 0


def _text_of(value: Any) -> str | None:
    """Return the JSON of a value. It is None for None, and for a value that is nested too deeply for orjson."""
    try:
        return None if value is None else orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return None


FILES: dict[str, type[RecordFile]] = {"jsonl": JsonLines, "parquet": ParquetFile}
"""The kinds of files by the setting `request_log.format`, which is also the suffix of their names."""
