"""Client libraries as subjects: each fetches one object by ranges, into fresh memory or into kept memory."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import xxhash
from raw_floor import Job, Memory, in_threads

_TIMEOUT_S = 60


class Client:
    """The common part of the clients: the job, the memory, and the check that the bytes equal the file."""

    def __init__(self, kept: bool, digest: str, **job: Any) -> None:
        self.job = Job(**job)
        self.memory = Memory(self.job.size_bytes, kept)
        self._digest = digest

    def pieces(self) -> list[memoryview]:
        """Return the fetched bytes, in the order of the file."""
        return [self.memory.view()]

    def check(self) -> None:
        digest = xxhash.xxh3_128()
        for piece in self.pieces():
            digest.update(piece)
        if digest.hexdigest() != self._digest:
            raise RuntimeError("the bytes differ from the file")

    def clear(self) -> None:
        self.memory.clear()


class HttpClient(Client):
    """http.client of the standard library, which reads with `readinto`."""

    def run(self) -> None:
        view, context, job = self.memory.view(), self.job.tls(), self.job

        def work(row: Iterator[tuple[int, int]]) -> None:
            connection = (
                http.client.HTTPSConnection(job.host, job.port, timeout=_TIMEOUT_S, context=context)
                if context
                else http.client.HTTPConnection(job.host, job.port, timeout=_TIMEOUT_S)
            )
            for begin, end in row:
                connection.request("GET", job.path, headers={"Range": f"bytes={begin}-{end - 1}"})
                response = connection.getresponse()
                at = begin
                while at < end:
                    at += response.readinto(view[at:end])
                response.read()
            connection.close()

        in_threads(job, work)


class Obstore(Client):
    """obstore: ranges in threads. Its calls release Python's lock. The bytes stay in memory that obstore has made, or are copied into kept memory."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        import obstore  # noqa: PLC0415
        from obstore.store import HTTPStore  # noqa: PLC0415

        self._obstore = obstore
        # obstore trusts the authorities in the file that SSL_CERT_FILE names.
        options: Any = {"allow_http": not self.job.authority, "timeout": f"{_TIMEOUT_S}s"}
        self._store = HTTPStore.from_url(self.job.url, client_options=options)
        self._got: dict[int, Any] = {}

    def run(self) -> None:
        path = self.job.path.lstrip("/")
        view = self.memory.view() if self.memory.kept else None

        def work(row: Iterator[tuple[int, int]]) -> None:
            for begin, end in row:
                got = self._obstore.get_range(self._store, path, start=begin, end=end)
                if view is None:
                    self._got[begin] = got
                else:
                    view[begin:end] = memoryview(got)

        in_threads(self.job, work)

    def pieces(self) -> list[memoryview]:
        if self.memory.kept:
            return super().pieces()
        return [memoryview(self._got[begin]) for begin in sorted(self._got)]

    def clear(self) -> None:
        self._got = {}
        super().clear()
