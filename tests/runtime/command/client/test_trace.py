"""Traces of calls: CSV and JSON lines, plain or compressed, with or without functions, and what is wrong with a file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import CodeError
from pilotflame.runtime.command.client.trace import read_trace, split


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "Timestamp,function\n12.5,b\n11,a\n10,b\n"),
        ("a.csv.gz", "function,TIMESTAMP\nb,12.5\na,11\nb,10\n"),
        ("a.jsonl", '{"timestamp": 12.5, "function": "b"}\n\n{"Timestamp": 11, "function": "a"}\n'
                    '{"timestamp": "10", "function": "b"}\n'),
        ("a.ndjson.gz", '{"timestamp": "1970-01-01T00:00:12.5", "function": "b"}\n{"timestamp": 11, "function": "a"}\n'
                        '{"timestamp": 10, "function": "b"}\n'),
    ],
)  # fmt: skip
def test_calls_are_read_by_function(name: str, text: str, tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, name, text)) == {"a": [1.0], "b": [0.0, 2.5]}


def test_columns_have_any_name_and_a_trace_may_have_no_functions(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "when,app\n3,x\n1,y\n")
    assert read_trace(path, time_column="When", function_column="App") == {"x": [2.0], "y": [0.0]}
    assert read_trace(path, time_column="when") == {"": [0.0, 2.0]}
    assert read_trace(written(tmp_path, "a.jsonl", "7\n5.5\n")) == {"": [0.0, 1.5]}


@pytest.mark.parametrize("decimals", ["", ".5", ".6805", ".680590", ".6805901"])
@pytest.mark.parametrize("zone", ["", "Z", "+02:00"])
def test_times_may_have_any_number_of_decimals_and_a_zone(decimals: str, zone: str, tmp_path: Path) -> None:
    times = f"2023-11-16T18:15:46{decimals}{zone}", f"2023-11-16T18:16:46{decimals}Z"
    (calls,) = read_trace(written(tmp_path, "a.csv", "timestamp\n{}\n{}\n".format(*times))).values()
    assert calls[1] == (2 * 3600 + 60 if zone == "+02:00" else 60)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "when\n1\n", "no column named timestamp"),
        ("a.jsonl", '{"when": 1}\n', "line 1, has no field named timestamp"),
        ("a.jsonl", "{broken\n", "cannot be read"),
        ("a.jsonl", "\n", "has no calls"),
        ("a.jsonl", '{"timestamp": [1]}\n', "which is not a time"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CodeError, match=said):
        read_trace(written(tmp_path, name, text))


@given(st.lists(st.floats(0, 1e6)).map(sorted), st.integers(1, 50), st.integers())
def test_calls_are_dealt_without_loss_and_repeatably(
    arrivals: list[float], functions: int, seed: int
) -> None:
    dealt = split(arrivals, functions, seed)
    assert dealt == split(arrivals, functions, seed)
    assert sorted(at_s for times in dealt.values() for at_s in times) == arrivals
    assert all(times == sorted(times) for times in dealt.values())
    assert len(dealt) <= functions
