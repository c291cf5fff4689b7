"""Reads segments of the shards of a snapshot, also while later chunks arrive in the files of another folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from ....errors import SnapshotChanged
from ...fetching.ranges import Chunks
from ...sources.folder import FolderSource, read_at
from ..mapping import Mapping
from .slab import Segment

MOST_GAP_BYTES = 32 << 10
"""If the gaps between runs are larger than this, the runs are read one by one."""
GATHERED_BYTES = 1 << 20
"""The most bytes of runs and gaps that are read together."""


class OpenShards:
    """The open shards of an upload. The arrival calls `move` and `show`, which record in which folder each chunk is."""

    def __init__(self, mapping: Mapping) -> None:
        """For a snapshot outside a cache, read the files that `mapping` has opened, even if other files now have their names."""
        self._mapping = mapping
        self._shards, self._chunks = mapping.manifest.shards, Chunks(mapping.manifest)
        self._roots = [mapping.root]
        self._moved: dict[int, int] = {}
        """The number of the folder of each chunk that is not in the first folder."""
        self._open: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def move(self, root: Path) -> None:
        self._roots.append(root)

    def show(self, chunk: int) -> None:
        if len(self._roots) > 1:
            self._moved[chunk] = len(self._roots) - 1

    def read(self, segments: Sequence[Segment], into: memoryview) -> None:
        """Read segments of files into the buffer of a piece. Raise SnapshotChanged if a file has become shorter."""
        for segment in segments:
            if segment.step - segment.run > MOST_GAP_BYTES:
                for number in range(segment.runs):
                    begin, at = segment.begin + number * segment.step, segment.at + number * segment.run
                    self._read_range(Segment(segment.shard, begin, begin + segment.run, at), into)
            elif segment.step:
                self._gather(segment, into)
            else:
                self._read_range(segment, into)

    def _gather(self, segment: Segment, into: memoryview) -> None:
        """Read runs together with the small gaps between them, which takes less time than a call for each run."""
        _, _, _, at, run, step = segment
        at_once = max(1, GATHERED_BYTES // step)
        read = torch.empty(min(at_once, segment.runs) * step, dtype=torch.uint8)
        for first in range(0, segment.runs, at_once):
            count, begin = min(at_once, segment.runs - first), segment.begin + first * step
            size_bytes = (count - 1) * step + run
            part = Segment(segment.shard, begin, begin + size_bytes, 0)
            self._read_range(part, read.numpy().data)
            target = torch.frombuffer(into[at : at + count * run], dtype=torch.uint8)
            target.view(count, run).copy_(read.as_strided((count, run), (step, 1)))
            at += count * run

    def _read_range(self, segment: Segment, into: memoryview) -> None:
        for root, begin, end in self._parts(segment):
            at = segment.at + begin - segment.begin
            self._read(root, segment.shard, begin, into[at : at + end - begin])

    def _parts(self, segment: Segment) -> list[tuple[int, int, int]]:
        if not self._moved:
            return [(0, segment.begin, segment.end)]
        parts = []
        for chunk in between(*self._chunks.covering(segment.shard, segment.begin, segment.end)):
            extent = self._chunks.extent(chunk)
            begin, end = max(extent.begin, segment.begin), min(extent.end, segment.end)
            parts.append((self._moved.get(chunk, 0), begin, end))
        return parts

    def _read(self, root: int, shard: int, offset: int, view: memoryview) -> None:
        done = read_at(self._descriptor(root, shard), view, offset)
        if done < len(view):
            fault = f"Shard {self._shards[shard].name} ends at byte {offset + done}."
            raise SnapshotChanged(fault, remedy="Fetch it again, or make the manifest anew.")

    def _descriptor(self, root: int, shard: int) -> int:
        with self._lock:
            found = self._open.get((root, shard))
            if found is None:
                found = self._open[root, shard] = self._opened(root, shard)
            return found

    def _opened(self, root: int, shard: int) -> int:
        if self._mapping.arrival is None:
            return self._mapping.opened(shard)
        return FolderSource(self._roots[root]).open(self._shards[shard].name)

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])


def between(first: int, last: int) -> range:
    return range(first, last + 1)
