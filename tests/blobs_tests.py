"""The contract of a store of blobs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from pilotflame.runtime.ground.storing.blobs import Blobs


class BlobsTests:
    """Tests of `Blobs`. Needs the fixture `blobs`, an empty store."""

    @pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1, 5_000_000])
    def test_a_blob_is_returned_until_it_is_deleted(self, blobs: Blobs, size: int) -> None:
        data = bytes(range(256)) * (size // 256) + b"\0" * (size % 256)
        blobs.put("1-a-b", data)
        blobs.put("1-a-c", b"other")
        assert blobs.get("1-a-b") == data
        blobs.delete(["1-a-b", "missing"])
        blobs.delete([])
        assert (blobs.get("1-a-b"), blobs.get("1-a-c")) == (None, b"other")

    def test_threads_may_share_a_store(self, blobs: Blobs) -> None:
        names = [f"1-{number}-x" for number in range(40)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: blobs.put(name, name.encode() * 1000), names))
            found = list(threads.map(blobs.get, names))
        assert found == [name.encode() * 1000 for name in names]

    def test_kept_blobs_stay(self, blobs: Blobs) -> None:
        blobs.put("1-a-b", b"1")
        blobs.keep(["1-a-b", "missing"])
        assert blobs.get("1-a-b") == b"1"
