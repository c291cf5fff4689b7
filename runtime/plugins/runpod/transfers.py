"""Downloads the files of a job's input, and uploads the files of its output, as the functions of RunPod's package do."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
import uuid
import zipfile
from collections.abc import Mapping
from email.message import Message
from pathlib import Path, PurePath
from typing import IO, Any
from urllib.parse import urlsplit

from ....handlers.files import MAX_BYTES, InputFiles
from ....snapshot.extras import needs

LINK_S = 604_800
_REGION = re.compile(r"(?:^|\.)(?:s3\.([a-z0-9-]+)\.[a-z0-9-]+\.|([a-z0-9-]+)\.digitaloceanspaces\.com$)")
"""The region in the host of an endpoint of AWS, Backblaze or DigitalOcean."""


class NamedFiles(InputFiles):
    """Downloads files. Their names are in the header Content-Disposition, or else in the URL."""

    name = ""
    """The name of the latest file."""

    def suffix(self, url: str, headers: Message) -> str:
        usual = super().suffix(url, headers)
        path = PurePath(urlsplit(url).path)
        self.name = headers.get_filename() or (usual if url.startswith("data:") else path.name)
        return PurePath(self.name).suffix or usual


def download_files_from_urls(job_id: str, urls: str | list[str]) -> list[str | None]:
    """Download files to jobs/<id>/downloaded_files. For each URL, return the path, or None if the download fails."""
    folder = (Path("jobs") / job_id / "downloaded_files").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with NamedFiles() as files:
        wanted = [urls] if isinstance(urls, str) else urls
        return [_download(files, url, folder) if url else None for url in wanted]


def file(file_url: str) -> dict[str, str | None]:
    """Download a file to the folder job_files, and return a description of it in RunPod's form. Unpack a zip archive.

    Raise ValueError if the file cannot be downloaded.
    """
    folder = Path("job_files").resolve()
    folder.mkdir(exist_ok=True)
    with NamedFiles() as files:
        path = _copied(files.fetch(file_url), folder)
    unpacked = _unpacked(path) if path.suffix == ".zip" else None
    kind = path.suffix.lstrip(".")
    return {"file_path": str(path), "type": kind, "original_name": files.name, "extracted_path": unpacked}


def _unpacked(archive: Path) -> str:
    with zipfile.ZipFile(archive) as source:
        if sum(one.file_size for one in source.infolist()) > MAX_BYTES:
            raise ValueError(f"the archive has more than {MAX_BYTES >> 30} GiB unpacked")
        source.extractall(archive.with_suffix(""))
    return str(archive.with_suffix(""))


def _download(files: InputFiles, url: str, folder: Path) -> str | None:
    try:
        return str(_copied(files.fetch(url), folder))
    except ValueError as error:
        sys.stderr.write(f"download: {error}\n")
        return None


def _copied(found: Path, folder: Path) -> Path:
    return shutil.copyfile(found, folder / f"{uuid.uuid4().hex}{found.suffix}")


def upload_image(
    job_id: str,
    image_location: str,
    result_index: int = 0,
    results_list: list[Any] | None = None,
    bucket_name: str | None = None,
) -> str:
    """Upload an image below `job_id`, with a new name. Return its presigned URL, or without a bucket the path of a copy."""
    suffix = Path(image_location).suffix
    name, extra = f"{uuid.uuid4().hex[:8]}{suffix}", {"ContentType": f"image/{suffix.lstrip('.')}"}
    with Path(image_location).open("rb") as source:
        found = _uploaded(source, f"{job_id}/{name}", None, bucket_name, extra, f"simulated_uploaded/{name}")
    if results_list is not None:
        results_list[result_index] = found
    return found


def upload_file_to_bucket(
    file_name: str,
    file_location: str,
    bucket_creds: dict[str, str] | None = None,
    bucket_name: str | None = None,
    prefix: str | None = None,
    extra_args: dict[str, Any] | None = None,
) -> str:
    """Upload a file and return its presigned URL.

    Without an endpoint and keys in `bucket_creds` or the environment, copy the file to the folder `local_upload`
    and return the path of the copy.
    """
    key = f"{prefix}/{file_name}" if prefix else file_name
    with Path(file_location).open("rb") as source:
        return _uploaded(source, key, bucket_creds, bucket_name, extra_args, f"local_upload/{file_name}")


def upload_in_memory_object(
    file_name: str,
    file_data: bytes,
    bucket_creds: dict[str, str] | None = None,
    bucket_name: str | None = None,
    prefix: str | None = None,
) -> str:
    """Upload `file_data` in the same way as `upload_file_to_bucket` uploads a file."""
    key = f"{prefix}/{file_name}" if prefix else file_name
    source = io.BytesIO(file_data)
    return _uploaded(source, key, bucket_creds, bucket_name, None, f"local_upload/{file_name}")


def files(job_id: str, file_list: list[str]) -> list[str]:
    """Upload images, and return the presigned URL of each, or the path of its copy."""
    return [upload_image(job_id, one) for one in file_list]


def bucket_upload(job_id: str, file_list: list[str], bucket_creds: dict[str, str]) -> list[str]:
    """Upload files under the prefix `job_id`, and return their URLs, which are not signed."""
    bucket, client = bucket_creds["bucketName"], _client(bucket_creds)
    for one in file_list:
        with Path(one).open("rb") as source:
            client.upload_fileobj(source, bucket, f"{job_id}/{one}")
    return [f"{bucket_creds['endpointUrl']}/{bucket}/{job_id}/{one}" for one in file_list]


def _uploaded(
    source: IO[bytes], key: str, creds: Mapping[str, str] | None, bucket: str | None, extra: Mapping[str, Any] | None,
    local: str,
) -> str:  # fmt: skip
    """Upload a file and return its presigned URL, or copy it to the path `local` if no bucket is known."""
    if (client := _client(creds)) is None:
        sys.stderr.write(f"upload: no bucket's endpoint and keys are set, so the file is copied to {local}\n")
        Path(local).parent.mkdir(parents=True, exist_ok=True)
        with Path(local).open("wb") as target:
            shutil.copyfileobj(source, target)
        return local
    where = {"Bucket": bucket or time.strftime("%m-%y"), "Key": key}
    client.upload_fileobj(source, where["Bucket"], key, ExtraArgs=dict(extra or {}))
    return str(client.generate_presigned_url("get_object", Params=where, ExpiresIn=LINK_S))


def _client(creds: Mapping[str, str] | None) -> Any:
    """Return a client of the bucket, or None if its endpoint or its keys are not known."""
    if not creds:
        names = {
            "endpointUrl": "ENDPOINT_URL",
            "accessId": "ACCESS_KEY_ID",
            "accessSecret": "SECRET_ACCESS_KEY",
        }
        creds = {key: os.environ.get(f"BUCKET_{name}", "") for key, name in names.items()}
    endpoint, key_id, secret = creds["endpointUrl"], creds["accessId"], creds["accessSecret"]
    if not (endpoint and key_id and secret):
        return None
    with needs("rp_upload", "boto3"):
        import boto3  # noqa: PLC0415  needed only for uploads
        from botocore.config import Config  # noqa: PLC0415

    region = _REGION.search(urlsplit(endpoint).hostname or "")
    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=key_id, aws_secret_access_key=secret,
        region_name=region and (region[1] or region[2]), config=Config(signature_version="s3v4"),
    )  # fmt: skip
