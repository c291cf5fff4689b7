"""Chunks of a file: cut where they should be, and honest about a file that ends early."""

from __future__ import annotations

from pathlib import Path

import xxhash
from pilotflame.snapshot.format.chunk import chunk_digests
from pilotflame.snapshot.sources.folder import FolderSource


def test_chunks_cover_the_file_and_reuse_the_buffer(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"aaaabbbbcc")
    found = list(chunk_digests(FolderSource(tmp_path), "f", 10, memoryview(bytearray(4))))
    assert found == [(xxhash.xxh3_128_hexdigest(part), len(part)) for part in (b"aaaa", b"bbbb", b"cc")]


def test_a_file_that_ends_early_ends_with_a_short_chunk(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"aaaabb")
    found = list(chunk_digests(FolderSource(tmp_path), "f", 12, memoryview(bytearray(4))))
    assert [count for _, count in found] == [4, 2]
