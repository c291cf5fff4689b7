"""The store of jobs on PostgreSQL."""

from __future__ import annotations

import pytest
from job_store_tests import JobStoreTests
from pilotflame.runtime.jobs.stored import large_bodies


class TestJobStore(JobStoreTests):
    """The store on PostgreSQL. conftest.py has its fixtures."""


class TestJobStoreWithFiles(JobStoreTests):
    """The same with large bodies for all of more than one byte."""

    @pytest.fixture(autouse=True)
    def files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(large_bodies, "MOST_INLINE_BYTES", 1)
