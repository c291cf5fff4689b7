"""Provides a stand-in for the `runpod` package. It has all that handlers use, except requests to RunPod's API."""

from __future__ import annotations

import inspect
import logging
import mimetypes
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from ....handlers.files import InputFiles
from ....handlers.stand_in import stand_in_modules
from ....snapshot.extras import needs

_LEVELS = {"DEBUG": logging.DEBUG, "WARN": logging.WARNING, "ERROR": logging.ERROR}
VERSION = "1.12.0"
"""The stand-in has the functions of this release of the package."""
DRIVER_S = 30.0
_FOLDERS = ("input_objects", "output_objects", "job_files")


def stand_in(start: Callable[..., Any], progress_update: Callable[..., Any]) -> dict[str, ModuleType]:
    """Return the modules of the stand-in by name. `start` and `progress_update` are among their functions."""
    serverless = {"start": start, "progress_update": progress_update}
    uploads = {one.__name__: one for one in (upload_file_to_bucket, upload_image, upload_in_memory_object)}
    downloads = {"download_files_from_urls": download_files_from_urls, "file": file}
    timers = {one.__name__: one for one in (Checkpoints, FunctionTimer, LineTimer)}
    outputs = (get_debugger_output, clear_debugger_output)
    debugger = {**timers, **{one.__name__: one for one in outputs}}
    return stand_in_modules(
        {
            "runpod": {"RunPodLogger": RunPodLogger, "api_key": None, "__version__": VERSION},
            "runpod.serverless": {**serverless, "register_fitness_check": lambda check: check},
            "runpod.serverless.modules": {},
            "runpod.serverless.modules.rp_handler": {"is_generator": is_generator},
            "runpod.serverless.modules.rp_logger": {"RunPodLogger": RunPodLogger},
            "runpod.serverless.modules.rp_progress": {"progress_update": progress_update},
            "runpod.serverless.utils": {**uploads, "download_files_from_urls": download_files_from_urls},
            "runpod.serverless.utils.rp_cleanup": {"clean": clean},
            "runpod.serverless.utils.rp_cuda": {"is_available": is_available},
            "runpod.serverless.utils.rp_debugger": debugger,
            "runpod.serverless.utils.rp_download": downloads,
            "runpod.serverless.utils.rp_upload": uploads,
            "runpod.serverless.utils.rp_validator": {"validate": validate},
        }
    )


def is_available() -> bool:
    """Return True if the driver's tool finds a GPU."""
    try:
        found = subprocess.run(["nvidia-smi"], capture_output=True, timeout=DRIVER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return b"NVIDIA-SMI" in found.stdout


def is_generator(handler: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler)


class Checkpoints:
    """The names and durations of steps that handlers measure. All calls return the same object."""

    _only: ClassVar[Checkpoints | None] = None

    def __new__(cls) -> Checkpoints:
        if cls._only is None:
            cls._only = object.__new__(cls)
            cls._only.clear()
        return cls._only

    def add(self, name: str) -> None:
        if name in self.name_lookup:
            raise KeyError(f"There is a checkpoint {name!r} already.")
        self.name_lookup[name] = len(self.checkpoints)
        self.checkpoints.append({"name": name})

    def start(self, name: str) -> None:
        self._named(name)["start"] = time.perf_counter()

    def stop(self, name: str) -> None:
        step = self._named(name)
        if "start" not in step:
            raise KeyError(f"The checkpoint {name!r} was not started.")
        step["end"] = time.perf_counter()

    def get_checkpoints(self) -> list[dict[str, Any]]:
        """Return the steps that have ended. Despite its name, `duration_ms` is in seconds, as in RunPod's package."""
        ended = [step for step in self.checkpoints if "start" in step and "end" in step]
        for step in ended:
            step["duration_ms"] = step["end"] - step["start"]
        return ended

    def clear(self) -> None:
        self.checkpoints: list[dict[str, Any]] = []
        self.name_lookup: dict[str, int] = {}

    def _named(self, name: str) -> dict[str, Any]:
        if name not in self.name_lookup:
            raise KeyError(f"There is no checkpoint {name!r}.")
        return self.checkpoints[self.name_lookup[name]]


class LineTimer:
    """Measures a `with` block as a step."""

    def __init__(self, name: str) -> None:
        self.checkpoints, self.name = Checkpoints(), name
        self.checkpoints.add(name)

    def __enter__(self) -> None:
        self.checkpoints.start(self.name)

    def __exit__(self, *_: object) -> None:
        self.checkpoints.stop(self.name)


class FunctionTimer:
    """Measures each call of the decorated function as a step."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with LineTimer(self.function.__name__):
            return self.function(*args, **kwargs)


def get_debugger_output() -> list[dict[str, Any]]:
    """Return the steps that have ended, and forget all steps."""
    found = Checkpoints().get_checkpoints()
    clear_debugger_output()
    return found


def clear_debugger_output() -> None:
    Checkpoints().clear()


class RunPodLogger:
    """A logger that writes to the function's log."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("runpod")

    def set_level(self, new_level: str) -> None:
        self._logger.setLevel(_LEVELS.get(str(new_level).upper(), logging.INFO))

    def log(self, message: object, message_level: str = "INFO", job_id: str | None = None) -> None:
        level = _LEVELS.get(str(message_level).upper(), logging.INFO)
        self._logger.log(level, "%s", message, extra={"invocation": job_id or "-"})

    def secret(self, secret_name: str, secret: str) -> None:
        self.info(f"{secret_name}: {'*' * min(len(secret), 8)}")

    def _log(self, level: str, message: object, request_id: str | None = None) -> None:
        self.log(message, level, request_id)

    debug = trace = partialmethod(_log, "DEBUG")
    info = tip = partialmethod(_log, "INFO")
    warn = partialmethod(_log, "WARN")
    error = partialmethod(_log, "ERROR")


def clean(folder_list: list[str] | None = None) -> None:
    """Remove the files that a job has left in the working directory, and the folders in `folder_list`."""
    for folder in (*_FOLDERS, *(folder_list or ())):
        shutil.rmtree(folder, ignore_errors=True)
    Path("output.zip").unlink(missing_ok=True)


def download_files_from_urls(job_id: str, urls: str | list[str]) -> list[str | None]:
    """Download files to jobs/<id>/downloaded_files. For each URL, return the path, or None if the download fails."""
    folder = (Path("jobs") / job_id / "downloaded_files").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with InputFiles() as files:
        wanted = [urls] if isinstance(urls, str) else urls
        return [_download(files, url, folder) if url else None for url in wanted]


def file(file_url: str) -> dict[str, str]:
    """Download a file to the folder job_files, and return a description of it in RunPod's form.

    Raises ValueError if the file cannot be downloaded.
    """
    folder = Path("job_files").resolve()
    folder.mkdir(exist_ok=True)
    with InputFiles() as files:
        path = _copied(files.fetch(file_url), folder)
    kind = path.suffix.lstrip(".")
    return {"file_path": str(path), "type": kind, "original_name": path.name, "extracted_path": ""}


def _download(files: InputFiles, url: str, folder: Path) -> str | None:
    try:
        return str(_copied(files.fetch(url), folder))
    except ValueError as error:
        sys.stderr.write(f"download: {error}\n")
        return None


def _copied(found: Path, folder: Path) -> Path:
    return shutil.copyfile(found, folder / f"{uuid.uuid4().hex}{found.suffix}")


def upload_image(job_id: str, image_location: str, *_: Any, **__: Any) -> str:
    """Upload an image under the prefix `job_id`, and return what `upload_file_to_bucket` returns."""
    return upload_file_to_bucket(Path(image_location).name, image_location, prefix=job_id)


def upload_file_to_bucket(
    file_name: str,
    file_location: str,
    bucket_creds: dict[str, str] | None = None,
    bucket_name: str | None = None,
    prefix: str | None = None,
    extra_args: dict[str, str] | None = None,
) -> str:
    """Upload a file and return its presigned URL.

    Without an endpoint in `bucket_creds` or the environment, copy the file to the folder `simulated_uploaded`
    and return the path of the copy.
    """
    content = Path(file_location).read_bytes()
    return upload_in_memory_object(file_name, content, bucket_creds, bucket_name, prefix)


def upload_in_memory_object(
    file_name: str,
    file_data: bytes,
    bucket_creds: dict[str, str] | None = None,
    bucket_name: str | None = None,
    prefix: str | None = None,
) -> str:
    """Upload `file_data` in the same way as `upload_file_to_bucket` uploads a file."""
    creds = bucket_creds or {
        "endpointUrl": os.environ.get("BUCKET_ENDPOINT_URL", ""),
        "accessId": os.environ.get("BUCKET_ACCESS_KEY_ID", ""),
        "accessSecret": os.environ.get("BUCKET_SECRET_ACCESS_KEY", ""),
    }
    key = f"{prefix}/{file_name}" if prefix else file_name
    if not creds.get("endpointUrl"):
        path = Path("simulated_uploaded") / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file_data)
        return str(path)
    return _put(creds, bucket_name or "uploads", key, file_data)


def _put(creds: Mapping[str, str], bucket: str, key: str, data: bytes) -> str:
    with needs("rp_upload", "boto3"):
        import boto3  # noqa: PLC0415  needed only for uploads

    keys = {"aws_access_key_id": creds["accessId"], "aws_secret_access_key": creds["accessSecret"]}
    client = boto3.client("s3", endpoint_url=creds["endpointUrl"], **keys)
    kind = mimetypes.guess_type(key)[0] or "application/octet-stream"
    client.put_object(Bucket=bucket, Key=key, Body=data, ContentType=kind)
    where = {"Bucket": bucket, "Key": key}
    return str(client.generate_presigned_url("get_object", Params=where, ExpiresIn=604800))


def validate(raw_input: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return {"validated_input": …} with the input and the schema's defaults, or {"errors": […]} if it is wrong."""
    unexpected = [key for key in raw_input if key not in schema]
    errors = [f"Unexpected input. {key} is not a valid input option." for key in unexpected]
    checked = dict(raw_input)
    for key, rules in schema.items():
        errors += _check(key, rules, checked)
    return {"errors": errors} if errors else {"validated_input": checked}


def _check(key: str, rules: dict[str, Any], checked: dict[str, Any]) -> list[str]:
    if "type" not in rules:
        return [f"Schema error, missing type for {key}."]
    if key not in checked:
        if rules.get("required", True):
            return [f"{key} is a required input."]
        if "default" not in rules:
            return [f"Schema error, missing default value for {key}."]
        checked[key] = rules["default"]
    wanted, errors = rules["type"], []
    if wanted is float and type(checked[key]) is int:
        checked[key] = float(checked[key])
    same_as_default = "default" in rules and isinstance(checked[key], type(rules["default"]))
    if not same_as_default and not isinstance(checked[key], wanted):
        errors.append(f"{key} should be {wanted} type, not {type(checked[key])}.")
    if "constraints" in rules and not rules["constraints"](checked[key]):
        errors.append(f"{key} does not meet the constraints.")
    return errors
