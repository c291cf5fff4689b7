"""The journal: after any crash it continues after the last complete line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pilotflame.errors import BatchFailed
from pilotflame.runtime.plugins.bulk.journal import Journal
from pilotflame.runtime.plugins.bulk.submitter import dumped

LINES = st.lists(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
    max_size=20,
)  # fmt: skip


def opened(folder: Path, *, function: str = "f", digest: str = "d", restart: bool = False) -> Journal:
    return Journal(folder / "out.jsonl", function=function, digest=digest, restart=restart)


@hypothesis_settings(max_examples=25, deadline=None)
@given(values=LINES, data=st.data())
def test_cut_anywhere_it_goes_on_after_the_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    lines = [dumped(value) for value in values]
    journal = opened(folder)
    for line in lines:
        journal.append(line)
    journal.close()
    text = journal.path.read_bytes()
    cut = data.draw(st.integers(0, len(text)))
    journal.path.write_bytes(text[:cut] + data.draw(st.sampled_from([b"", b"\0" * 7, b"\0\n\0\n"])))
    again = opened(folder)
    assert again.run == journal.run
    assert again.done == text[:cut].count(b"\n")
    for line in lines[again.done :]:
        again.append(line)
    again.close()
    assert [json.loads(line) for line in again.path.read_bytes().splitlines()] == values


def test_failures_before_a_crash_are_counted_and_answers_with_an_error_are_not(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for value in ({"error": {"message": "no", "details": {"input_line": 1}}}, {"error": "mine"}, 1):
        journal.append(dumped(value))
    journal.close()
    again = opened(tmp_path)
    assert (again.done, again.failed) == (3, 1)
    again.close()


@pytest.mark.parametrize("other", [{"function": "g"}, {"digest": "e"}])
def test_another_batch_does_not_continue_it(tmp_path: Path, other: dict[str, str]) -> None:
    journal = opened(tmp_path)
    journal.append(b"1")
    journal.close()
    with pytest.raises(BatchFailed, match="--restart"):
        opened(tmp_path, **other)
    anew = opened(tmp_path, restart=True, **other)
    assert anew.done == 0
    assert anew.run != journal.run
    anew.close()


def test_what_is_finished_is_not_overwritten(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append(b"1")
    journal.sync()
    journal.finish()
    journal.close()
    with pytest.raises(BatchFailed, match="already exists"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert journal.path.read_bytes() == b"1\n"


def test_two_batches_do_not_write_one_output(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(BatchFailed, match="by another batch"):
        opened(tmp_path)
    journal.close()
