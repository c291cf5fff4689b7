"""Provides a stand-in for the `runpod` package. It has all that handlers use, except requests to RunPod's API."""

from __future__ import annotations

import inspect
import logging
import shutil
import subprocess
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

from ....handlers.stand_in import stand_in_modules
from .debugger import Checkpoints, FunctionTimer, LineTimer, clear_debugger_output, get_debugger_output
from .transfers import (
    bucket_upload,
    download_files_from_urls,
    file,
    files,
    upload_file_to_bucket,
    upload_image,
    upload_in_memory_object,
)
from .validator import validate

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
    timers = (Checkpoints, FunctionTimer, LineTimer, clear_debugger_output)
    output = {"get_debugger_output": partial(get_debugger_output, VERSION)}
    debugger = {**{one.__name__: one for one in timers}, **output}
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
            "runpod.serverless.utils.rp_upload": {**uploads, "bucket_upload": bucket_upload, "files": files},
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
