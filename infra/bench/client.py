"""HTTP clients as contestants: each brings one object by ranges, into fresh memory or into kept memory."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import checkpoint
import xxhash
from raw_floor import Job, Memory, in_threads

_CREDENTIALS = ("bench", "bench-secret")
_READ = 1 << 20
_TIMEOUT_S = 60


class Client:
    """The common part of the clients: the job, the memory, and the check that the bytes equal the file."""

    def __init__(self, kept: bool, digest: str, ranges: list[list[int]] | None = None, **job: Any) -> None:
        self.job = Job(**job)
        self.memory = Memory(self.job.size_bytes, kept)
        self.ranges = [(begin, end) for begin, end in ranges or []]
        self._digest = digest

    def pieces(self) -> list[memoryview]:
        """The fetched bytes, in the order of the file."""
        return [self.memory.view()]

    def check(self) -> None:
        digest = xxhash.xxh3_128()
        for piece in self.pieces():
            digest.update(piece)
        if digest.hexdigest() != self._digest:
            raise RuntimeError("the bytes are not the file's")

    def clear(self) -> None:
        self.memory.clear()


class HttpClient(Client):
    """http.client of the standard library, `readinto`."""

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

        in_threads(job.connections, job.parts(), work)


class Boto3(Client):
    """boto3 `get_object` of ranges in threads, its body read into memory."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._client = s3_client(self.job.url, self.job.connections)
        _, self._bucket, self._key = self.job.path.split("/", 2)

    def run(self) -> None:
        view = self.memory.view()

        def work(row: Iterator[tuple[int, int]]) -> None:
            for begin, end in row:
                wanted = f"bytes={begin}-{end - 1}"
                body = self._client.get_object(Bucket=self._bucket, Key=self._key, Range=wanted)["Body"]
                at = begin
                while at < end and (count := body.readinto(view[at:end])):
                    at += count
                body.close()

        in_threads(self.job.connections, self.job.parts(), work)


def s3_client(url: str, connections: int) -> Any:
    """A boto3 client of a path-style endpoint that asks for no signature worth the name."""
    import boto3  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    config = Config(
        s3={"addressing_style": "path"},
        max_pool_connections=connections,
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
    )
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=_CREDENTIALS[0],
        aws_secret_access_key=_CREDENTIALS[1],
        config=config,
    )


class Obstore(Client):
    """obstore: ranges in threads (its calls let go of the GIL), or `get_ranges`, by tensor or by part.

    It gives memory of its own, which is held until the turn's end; or it is copied into kept memory.
    """

    def __init__(self, way: str, **given: Any) -> None:
        super().__init__(**given)
        import obstore  # noqa: PLC0415
        from obstore.store import HTTPStore  # noqa: PLC0415

        self._obstore = obstore

        # It takes the authorities of the file that SSL_CERT_FILE names: the lane's environment.
        options: Any = {"allow_http": not self.job.authority, "timeout": f"{_TIMEOUT_S}s"}
        self._store = HTTPStore.from_url(self.job.url, client_options=options)
        self._way = way
        self._wanted = self.ranges if way != "parts" else self.job.parts()
        self._got: dict[int, Any] = {}
        self._pool = ThreadPoolExecutor(self.job.connections)

    def run(self) -> None:
        path = self.job.path.lstrip("/")
        if self._way == "ranges":
            starts, ends = zip(*self._wanted, strict=True)
            self._got = dict(
                zip(
                    starts, self._obstore.get_ranges(self._store, path, starts=starts, ends=ends), strict=True
                )
            )
            return
        view = self.memory.view() if self.memory.kept else None

        def bring(wanted: tuple[int, int]) -> None:
            begin, end = wanted
            got = self._obstore.get_range(self._store, path, start=begin, end=end)
            if view is None:
                self._got[begin] = got
            else:
                view[begin:end] = memoryview(got)

        for _ in self._pool.map(bring, self._wanted):
            pass

    def pieces(self) -> list[memoryview]:
        if self.memory.kept:
            return super().pieces()
        return [memoryview(self._got[begin]) for begin in sorted(self._got)]

    def check(self) -> None:
        if self._way == "parts":
            super().check()
            return
        # Tensors alone do not make the file's digest, since the header is missing: compared one by one.
        with (checkpoint.DATA / self.job.path.lstrip("/")).open("rb") as file:
            for begin, end in self.ranges:
                file.seek(begin)
                got = memoryview(self._got[begin]) if self._got else self.memory.view()[begin:end]
                if xxhash.xxh3_128_digest(got) != xxhash.xxh3_128_digest(file.read(end - begin)):
                    raise RuntimeError(f"bytes {begin} to {end} are not the file's")

    def clear(self) -> None:
        self._got = {}
        super().clear()


class Aiohttp(Client):
    """aiohttp on uvloop, in one thread: what arrives is copied to its place."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        import aiohttp  # noqa: PLC0415
        import uvloop  # noqa: PLC0415

        self._aiohttp, self._uvloop = aiohttp, uvloop

    def run(self) -> None:
        self._uvloop.run(self._all())

    async def _all(self) -> None:
        view, row = self.memory.view(), iter(self.job.parts())
        connector = self._aiohttp.TCPConnector(limit=self.job.connections, ssl=self.job.tls() or False)
        async with self._aiohttp.ClientSession(
            self.job.url, connector=connector, read_bufsize=_READ
        ) as session:

            async def work() -> None:
                for begin, end in row:
                    async with session.get(
                        self.job.path, headers={"Range": f"bytes={begin}-{end - 1}"}
                    ) as response:
                        at = begin
                        while piece := await response.content.readany():
                            view[at : at + len(piece)] = piece
                            at += len(piece)

            await asyncio.gather(*(work() for _ in range(self.job.connections)))


class Crt(Client):
    """The AWS common runtime's S3 client, its own parts and connections; `on_body` copies to the place."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        from awscrt import auth, io, s3  # noqa: PLC0415
        from awscrt import http as crt_http  # noqa: PLC0415

        self._http, self._s3 = crt_http, s3
        trust = io.TlsContextOptions()
        if self.job.authority:
            trust.override_default_trust_store_from_path(ca_filepath=self.job.authority)
        group = io.EventLoopGroup(2)
        bootstrap = io.ClientBootstrap(group, io.DefaultHostResolver(group))
        self._client = s3.S3Client(
            bootstrap=bootstrap,
            region="us-east-1",
            tls_mode=s3.S3RequestTlsMode.ENABLED if self.job.authority else s3.S3RequestTlsMode.DISABLED,
            tls_connection_options=(
                io.ClientTlsContext(trust).new_connection_options() if self.job.authority else None
            ),
            signing_config=s3.create_default_s3_signing_config(
                region="us-east-1", credential_provider=auth.AwsCredentialsProvider.new_static(*_CREDENTIALS)
            ),
            part_size=self.job.part_bytes,
            max_active_connections_override=self.job.connections,
        )

    def run(self) -> None:
        view = self.memory.view()

        def on_body(chunk: bytes, offset: int, **_: Any) -> None:
            view[offset : offset + len(chunk)] = chunk

        headers = self._http.HttpHeaders([("host", f"{self.job.host}:{self.job.port}")])
        request = self._http.HttpRequest("GET", self.job.path, headers)
        asked = self._client.make_request(
            type=self._s3.S3RequestType.GET_OBJECT, request=request, on_body=on_body
        )
        asked.finished_future.result(_TIMEOUT_S)
