"""A cgroup with a limit of memory, for processes of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pilotflame.errors import LauncherError
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.node.launching.cgroups import Cgroup, find_controllers, make_cgroup


@contextmanager
def limited_group(memory_mb: int) -> Iterator[Cgroup]:
    """Make the group; skip the test where this process may not. At the end, nothing in it may have been killed."""
    if not any(one.name == "memory" for one in find_controllers()):
        pytest.skip("this process may not make cgroups with limits of memory")
    try:
        group = make_cgroup(f"pf-test-{os.getpid()}", Resources(memory_mb=memory_mb))
    except LauncherError as error:
        pytest.skip(str(error))
    assert group is not None
    try:
        yield group
        assert group.memory_kills is not None
        kills = dict(line.split() for line in group.memory_kills.read_text().splitlines())
        assert kills["oom_kill"] == "0"
    finally:
        group.remove()
