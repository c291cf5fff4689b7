"""What `live` promises to tests: the memory of their caches is freed, and the caches of other processes stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from live import give_memory_back, short_folder
from pilotflame.snapshot.caching.node import node_cache, node_tiers

# A pytest plugin that makes the cache of another gateway in the given folder while the tests run.
ELSEWHERE = """
import os
from pathlib import Path
from pilotflame.snapshot.caching.node import node_cache

def pytest_runtest_call():
    node_cache(Path(os.environ["ELSEWHERE"]))
"""


def test_a_cache_in_a_short_folder_leaves_no_memory() -> None:
    with short_folder() as folder:
        memory = node_cache(folder / "cache").tiers[0]
        assert memory.kind == "tmpfs"
        (memory.root / "snapshots").mkdir()
    assert not memory.root.exists()


def test_a_test_process_leaves_the_cache_of_another_process_in_memory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    cache = tmp_path / "cache"
    variables = os.environ | {"PYTHONPATH": str(tmp_path), "ELSEWHERE": str(cache)}
    # The new process must run its tests without workers of xdist, even if this process is one.
    variables.pop("PYTEST_XDIST_WORKER", None)
    tests = Path(__file__).with_name("test_addresses.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "elsewhere", tests]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert [tier.kind for tier in node_tiers(cache)] == ["tmpfs", "disk"]
    give_memory_back(tmp_path)
    assert [tier.kind for tier in node_tiers(cache)] == ["disk"]
