"""Identity: ids in the order of time, digests that tell things apart."""

import re

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.identity import idempotency_digest, new_job_id, tombstone_key

TEXT = st.text(st.characters(exclude_categories=()), max_size=5)  # surrogates too, as headers may bring them


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 40))
def test_ids_sort_by_time(start_ms: int, later_ms: int) -> None:
    first, second = new_job_id(start_ms / 1000), new_job_id((start_ms + later_ms) / 1000 + 0.001)
    assert first < second
    assert re.fullmatch("job-[0-9a-v]{26}", first)


def test_ids_of_one_moment_differ_in_all_that_is_not_time() -> None:
    ids = [new_job_id(1e9) for _ in range(1000)]
    assert len({job_id[14:] for job_id in ids}) == 1000
    assert len({job_id[:13] for job_id in ids}) == 1


def test_a_clock_before_its_time_gives_an_id_too() -> None:
    assert new_job_id(-5.0).startswith("job-000")


@given(st.tuples(TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT))
def test_digests_are_equal_only_for_equals(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert idempotency_digest(*one[:2], one[2] + "k") is not None
    same = idempotency_digest(*one) == idempotency_digest(*other)
    assert same == (one == other or one[2] == other[2] == "")
    assert (tombstone_key(*one[:2]) == tombstone_key(*other[:2])) == (one[:2] == other[:2])


def test_no_key_has_no_digest() -> None:
    assert idempotency_digest("f", "o", "") is None
