"""Stores an object of S3 part by part. The store copies parts that it has in other objects. Other parts are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore import exceptions
from s3transfer.utils import ReadFileChunk

REQUESTS = 8
"""How many parts are sent or copied at the same time."""


@dataclass(frozen=True, slots=True)
class S3Part:
    """Bytes [begin, end) of an object. `copied` has the parameters to copy them from another object, or is empty."""

    begin: int
    end: int
    copied: dict[str, Any]


def can_copy(error: exceptions.ClientError) -> bool:
    """Return False if the error means that the store cannot copy parts, as some stores with the interface of S3."""
    return error.response.get("Error", {}).get("Code", "") not in {
        "NotImplemented",
        "501",
        "MethodNotAllowed",
    }


def store_parts(
    boto: Any, target: dict[str, str], content: Path, parts: Sequence[S3Part], sent: Callable[[int], None]
) -> None:
    """Store file `content` as an object. `target` has the parameters that name the object in every request.

    Raises ClientError. Then the object has not changed.
    """
    upload = {**target, "UploadId": boto.create_multipart_upload(**target)["UploadId"]}

    def store(number: int) -> dict[str, Any]:
        part = parts[number - 1]
        size_bytes = part.end - part.begin
        if part.copied:
            answer = boto.upload_part_copy(**upload, **part.copied, PartNumber=number)["CopyPartResult"]
        else:
            with ReadFileChunk.from_filename(str(content), part.begin, size_bytes) as body:
                answer = boto.upload_part(**upload, PartNumber=number, Body=body, ContentLength=size_bytes)
        sent(size_bytes)
        return {"ETag": answer["ETag"], "PartNumber": number}

    pool = ThreadPoolExecutor(REQUESTS, "snapshot-part")
    try:
        stored = list(pool.map(store, range(1, len(parts) + 1)))
        boto.complete_multipart_upload(**upload, MultipartUpload={"Parts": stored})
    except BaseException:
        pool.shutdown(cancel_futures=True)
        # The store keeps the parts of an upload that is neither completed nor aborted, and charges for them.
        with suppress(exceptions.ClientError, exceptions.BotoCoreError):
            boto.abort_multipart_upload(**upload)
        raise
    finally:
        pool.shutdown()
