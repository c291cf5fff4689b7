"""A snapshot that is larger than the memory of the cgroup is fetched to the disk and read from there; nothing is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import xxhash
from fault_server import FaultServer
from limited_group import limited_group
from pulling import make

LIMIT_MB, TENSORS, TENSOR_BYTES = 96, 6, 32 << 20
# The program joins the cgroup and fetches the snapshot. It prints the budgets of the tiers, the folder of the snapshot,
# and the digest of the bytes that it reads through a mapping.
CHILD = """
import json, mmap, sys
from pathlib import Path
for file in sys.argv[4:]:
    open(file, "w").write("0")
import xxhash
from pilotflame.snapshot.caching.node import node_cache, release_memory
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.http import HttpSource

manifest, url, folder = Manifest.read(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
cache = node_cache(folder)
with cache.open(manifest, HttpSource(url)) as lease:
    lease.wait(120)
    whole = xxhash.xxh3_128()
    with open(lease.root / manifest.shards[0].name, "rb") as stream:
        with mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as memory:
            whole.update(memory)
    budgets = {tier.kind: tier.budget_bytes for tier in cache.tiers}
    print(json.dumps([budgets, str(lease.root), whole.hexdigest()]))
release_memory(cache)
"""


def test_a_snapshot_of_twice_the_memory_is_fetched_to_the_disk_and_read(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    manifest = make(source, tensors=TENSORS, tensor_bytes=TENSOR_BYTES)
    assert manifest.total_bytes > 1.9 * (LIMIT_MB << 20)
    with limited_group(LIMIT_MB) as group, FaultServer(source) as server:
        joins = [str(file) for file in group.joins]
        command = [sys.executable, "-c", CHILD, str(source), server.url, str(cache), *joins]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    budgets, root, digest = json.loads(done.stdout)
    assert budgets["tmpfs"] == (LIMIT_MB << 20) // 4
    assert Path(root).is_relative_to(cache)
    assert digest == xxhash.xxh3_128_hexdigest((source / manifest.shards[0].name).read_bytes())
