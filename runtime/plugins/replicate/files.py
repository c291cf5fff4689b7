"""Serves Replicate's routes of files, and finds uploaded files in the inputs of predictions."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import (
    BadInput,
    InputInvalid,
    InputTimeout,
    InputTooLarge,
    JobStoreFailed,
    StorageFull,
    UnknownFile,
    UnsupportedMedia,
)
from ....handlers.codec import BYTES_TYPE
from ....handlers.files import media_type
from ....handlers.forms import FormField, FormParser
from ...front.http.content_coding import CODINGS
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import caller_of, coding_of, continue_body, dump_json, load_json, owner_of
from ...front.http.responses import Timestamp, json_response, made, timestamp
from ...front.http.routes import Route
from ...front.listening.origins import Origins
from ...ground.access.keys import ALL, Scope
from ...jobs.stored.job import Job
from ..predictions.prediction import FORM as FORM_OF_JOB
from .file_store import FileStore, expires_s
from .problem import ERRORS
from .upload import MAX_FILE_BYTES, StoredFile, Upload

BLOCK_BYTES = 1 << 20
MAX_METADATA_BYTES = 64 << 10
MAX_NAME_CHARS = 255
MAX_FIELDS = 20
"""The most fields of a form. The event loop parses the headers of each."""
UPLOAD_TIMEOUT_S = 600.0
SWEEP_S = 3600.0
CONTENT, METADATA = "content", "metadata"
_URL = re.compile(r"(?:https?://([^/?#]+))?(?:/replicate)?/v1/files/([0-9a-f]{32})(?:/download)?")
# JSON may escape slashes, as PHP does.
_MARK, _ESCAPED_MARK = b"/v1/files/", rb"\/v1\/files\/"


class UploadedFile(TypedDict):
    """A file that was uploaded."""

    id: str
    name: str
    content_type: str
    size: int
    etag: str
    checksums: dict[str, str]
    metadata: dict[str, Any]
    created_at: Timestamp
    expires_at: Timestamp
    urls: dict[str, str]


FILES = {"previous": str | None, "next": str | None, "results": list[UploadedFile]}
FORM = {"multipart/form-data": {CONTENT: bytes, "metadata?": dict[str, Any]}}


class FilesApi:
    """The routes of files. Only the uploader of a file and administrators can use it."""

    def __init__(self, store: FileStore, origins: Origins, origin_of: Callable[[web.Request], str]) -> None:
        """`origin_of` returns the URL below which a caller finds the paths of `routes`."""
        self._store, self._origins, self._origin_of = store, origins, origin_of

    def routes(self) -> list[Route]:
        base, one, call = "/v1/files", "/v1/files/{id}", Scope.INVOKE
        download: dict[str, Any] = {"response": {BYTES_TYPE: bytes}, "errors": (404,)}
        created: dict[str, Any] = {"status": 201, "body": FORM, "errors": (400, 408, 413, 415, 507)}
        return [
            Route("POST", base, self.create, call, "Upload a file.", UploadedFile, **created, **ERRORS),
            Route("GET", base, self.list, call, "List files.", FILES, errors=(), **ERRORS),
            Route("GET", one, self.show, call, "Show a file.", UploadedFile, errors=(404,), **ERRORS),
            Route("DELETE", one, self.delete, call, "Delete a file.", status=204, errors=(404,), **ERRORS),
            Route("GET", f"{one}/download", self.download, call, "Download a file.", **download, **ERRORS),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Store the field `content` of a form. The field `metadata` may hold a JSON object."""
        if request.content_type != "multipart/form-data":
            raise BadInput("The body is not a form.", remedy="Send multipart/form-data with a field content.")
        if (coding := coding_of(request.headers)) in CODINGS:
            raise UnsupportedMedia(f"The form has the Content-Encoding {coding}.", remedy="Send it unpacked.")
        await continue_body(request)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                about = await self._receive(request)
        except TimeoutError:
            raise InputTimeout(f"The upload took longer than {UPLOAD_TIMEOUT_S:.0f} s.") from None
        except web.RequestPayloadError as error:
            raise BadInput(f"The body broke off or is malformed: {error}.") from None
        return json_response(self._shown(about, request), status=201)

    async def list(self, request: web.Request) -> web.StreamResponse:
        found = await asyncio.to_thread(self._store.list, owner_of(request))
        return json_response(
            {"previous": None, "next": None, "results": [self._shown(one, request) for one in found]}
        )

    async def show(self, request: web.Request) -> web.StreamResponse:
        about, _ = await asyncio.to_thread(self._store.get, request.match_info["id"], owner_of(request))
        return json_response(self._shown(about, request))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        await asyncio.to_thread(self._store.delete, request.match_info["id"], owner_of(request))
        return web.Response(status=204)

    async def download(self, request: web.Request) -> web.StreamResponse:
        _, path = await asyncio.to_thread(self._store.get, request.match_info["id"], owner_of(request))
        # A browser must not show the file as a page of this gateway.
        headers = {"Content-Type": BYTES_TYPE, "Content-Disposition": "attachment"}
        return web.FileResponse(path, headers=headers)

    async def sweep(self) -> None:
        """Remove expired files now and every hour. Does not return."""
        while True:
            await asyncio.to_thread(self._store.sweep)
            await asyncio.sleep(SWEEP_S)

    async def given(
        self, request: web.Request, body: bytes, found: Any, most: int | None
    ) -> tuple[bytes, dict[str, str]]:
        """Return the input for the function as JSON, and the paths of the input's files by their URLs.

        `found` is the parsed input, and `body` is the request's body. A function in a container cannot read the paths
        of files. For such a function, `most` is a number of bytes, and the files are in the input as data URLs. Raise
        InputInvalid if a file is missing, InputTooLarge if the data URLs are larger than `most`, BadInput if the input
        is nested too deeply.
        """
        urls = list[tuple[str, str]]()
        if _MARK in body or _ESCAPED_MARK in body:
            authority = self._origins.of(request).partition("//")[2]
            urls = await parsed(request, body, lambda _: [*_urls(found, authority)])
        files, contents = await self._contents(urls, owner_of(request), most) if urls else ({}, {})
        size = len(body) + sum(map(len, contents.values()))
        return await made(request, size, lambda: dump_json(_replaced(found, contents))), files

    async def brought(self, job: Job) -> Job:
        """Return a job with the paths of its files on this machine. Another gateway may have accepted the job. Raise
        JobStoreFailed if the files cannot be read or stored.
        """
        about = (job.extra or {}).get(FORM_OF_JOB, {})
        ids = {url: match[2] for url in about.get("files", ()) if (match := _URL.fullmatch(url))}
        try:
            files = await asyncio.to_thread(self._files, ids, ALL) if ids else {}
        except InputInvalid:
            # Run the job anyway: the handler reports that a file is missing.
            return job
        except StorageFull as error:
            raise JobStoreFailed(error.message, remedy=error.remedy) from error
        paths = {url: str(path) for url, (_, path) in files.items()}
        return (
            replace(job, extra={**(job.extra or {}), FORM_OF_JOB: {**about, "files": paths}})
            if paths
            else job
        )

    async def _contents(
        self, urls: Sequence[tuple[str, str]], owner: str, most: int | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return (paths, data URLs) of files, each by the URLs of the files. Without `most`, the data URLs are empty.
        With `most`, the paths are empty: a function in a container cannot read them.
        """
        files = await asyncio.to_thread(self._files, dict(urls), owner)
        if most is None:
            return {url: str(path) for url, (_, path) in files.items()}, {}
        # Count a file for each of its URLs in the input, which may have the same URL many times.
        if (size := sum(files[url][0].size for url, _ in urls)) * 4 // 3 > most:
            message = f"The input's files have {size} bytes. They reach a function in a container inside the body, of at most {most} bytes, a third more."
            raise InputTooLarge(message, remedy="Send addresses from which the function can fetch them.")
        return {}, await asyncio.to_thread(_data_urls, files)

    def _files(self, urls: dict[str, str], owner: str) -> dict[str, tuple[StoredFile, Path]]:
        try:
            return {url: self._store.get(file_id, owner) for url, file_id in urls.items()}
        except UnknownFile as error:
            raise InputInvalid(f"The input names a file that is not there. {error}") from None

    async def _receive(self, request: web.Request) -> StoredFile:
        form = FormParser(request.headers.get("Content-Type", ""), MAX_FIELDS)
        upload, kind, metadata, field = None, "", b"", ""
        await asyncio.to_thread(self._store.check_disk)
        await asyncio.to_thread(self._store.load, caller_of(request).owner)
        try:
            async for piece in request.content.iter_chunked(BLOCK_BYTES):
                for found in form.feed(piece):
                    if isinstance(found, FormField):
                        # A second file is ignored.
                        field = found.name if found.name != CONTENT or upload is None else ""
                        if field == CONTENT:
                            kind = found.content_type or BYTES_TYPE
                            upload = self._begin(request, found)
                    elif field == CONTENT and upload is not None:
                        await asyncio.to_thread(upload.write, found)
                    elif field == METADATA:
                        metadata = _longer(metadata, found)
            form.end()
            if upload is None:
                raise BadInput("The form has no file.", remedy=f"Send it as the field {CONTENT}.")
            return await asyncio.to_thread(self._store.finish, upload, kind, _metadata(metadata))
        finally:
            if upload is not None:
                await asyncio.to_thread(self._store.discard, upload)

    def _begin(self, request: web.Request, field: FormField) -> Upload:
        # The form is larger than the file in it, so the form's length limits the file. A form without a
        # length may hold a file of the maximum size.
        most = MAX_FILE_BYTES if request.content_length is None else request.content_length
        return self._store.begin(caller_of(request).owner, (field.file or "file")[:MAX_NAME_CHARS], most)

    def _shown(self, about: StoredFile, request: web.Request) -> UploadedFile:
        return UploadedFile(
            id=about.id, name=about.name, content_type=about.content_type, size=about.size, etag=about.md5,
            checksums={"sha256": about.sha256, "md5": about.md5}, metadata=about.metadata,
            created_at=timestamp(about.created_s), expires_at=timestamp(expires_s(about)),
            urls={"get": f"{self._origin_of(request)}/v1/files/{about.id}"},
        )  # fmt: skip


def _longer(metadata: bytes, piece: bytes) -> bytes:
    if len(metadata) + len(piece) > MAX_METADATA_BYTES:
        raise BadInput(f"The field {METADATA} is larger than {MAX_METADATA_BYTES} bytes.")
    return metadata + piece


def _metadata(text: bytes) -> dict[str, Any]:
    found = load_json(text or b"{}")
    if not isinstance(found, dict):
        raise BadInput(f"The field {METADATA} is not a JSON object.", remedy="Send {} or leave it out.")
    return found


def _urls(found: Any, authority: str) -> Iterator[tuple[str, str]]:
    """Yield (URL, id) of each file of this API in a parsed input. Skip URLs with another host than `authority`."""
    for _, _, text in _texts([found]):
        if (match := _URL.fullmatch(text)) and (match[1] is None or match[1].lower() == authority.lower()):
            yield text, match[2]


def _texts(found: list[Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield (list or object, position or name, string) for each string in a parsed list. The caller may replace the string."""
    stack: list[Any] = [found]
    while stack:
        one = stack.pop()
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(value, str):
                yield one, key, value
            elif isinstance(value, (dict, list)):
                stack.append(value)


def _data_urls(files: Mapping[str, tuple[StoredFile, Path]]) -> dict[str, str]:
    try:
        return {
            url: f"data:{media_type(about.name)}{_name(path)};base64,{base64.b64encode(path.read_bytes()).decode()}"
            for url, (about, path) in files.items()
        }
    except OSError as error:
        raise InputInvalid(f"A file of the input cannot be read: {error.strerror}.") from None


def _name(path: Path) -> str:
    """Return the parameter `name` of a data URL, which keeps the file's extension, or "" for an unusual extension."""
    return f";name={path.name}" if path.name.isascii() and path.name.replace(".", "").isalnum() else ""


def _replaced(found: Any, contents: Mapping[str, str]) -> Any:
    """Return a parsed input. In it, replace each string that is a key of `contents` by its value."""
    box = [found]
    for place, key, text in _texts(box) if contents else ():
        if text in contents:
            place[key] = contents[text]
    return box[0]
