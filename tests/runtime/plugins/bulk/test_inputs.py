"""Inputs: lines of files and folders, numbered, in order, from any line on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pilotflame.errors import BatchFailed
from pilotflame.runtime.plugins.bulk import inputs
from pilotflame.runtime.plugins.bulk.inputs import Inputs


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"3\n4")
    (tmp_path / "a.ndjson").write_bytes(b"\xef\xbb\xbf1\r\n\n")
    (tmp_path / "notes.txt").write_bytes(b"no\n")
    found = Inputs.open(str(tmp_path))
    assert [(line.number, line.place, line.text) for line in found.lines()] == [
        (1, "a.ndjson, line 1", b"1"),
        (2, "a.ndjson, line 2", b""),
        (3, "b.jsonl, line 1", b"3"),
        (4, "b.jsonl, line 2", b"4"),
    ]
    assert [line.text for line in found.lines(2)] == [b"3", b"4"]


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.binary(max_size=9).filter(lambda text: not set(text) & {10, 13, 0xEF})),
    piece=st.integers(1, 16),
)
def test_lines_do_not_depend_on_the_size_of_reads(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], piece: int
) -> None:
    path = tmp_path_factory.mktemp("inputs") / "in.jsonl"
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "PIECE_BYTES", piece)
        found = Inputs.open(str(path))
        assert [line.text for line in found.lines()] == texts
    ends = [line.end for line in found.lines()]
    assert ends == sorted(ends)
    assert not ends or ends[-1] == found.total_bytes


def test_a_change_shows_in_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n")
    before = Inputs.open(str(path)).digest
    assert Inputs.open(str(path)).digest == before
    path.write_bytes(b"1\n2\n")
    assert Inputs.open(str(path)).digest != before


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFailed, match=r"none\.jsonl is neither a file nor a folder"):
        Inputs.open(str(tmp_path / "none.jsonl"))
    with pytest.raises(BatchFailed, match="neither a file nor a folder"):
        Inputs.open(str(tmp_path / "none"))
    with pytest.raises(BatchFailed, match=r"no \.jsonl"):
        Inputs.open(str(tmp_path))
    with pytest.raises(
        BatchFailed, match=r"http://127\.0\.0\.1:1/inputs cannot be listed\. Name a JSONL file"
    ):
        Inputs.open("http://127.0.0.1:1/inputs")
