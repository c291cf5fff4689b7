"""The command that records the order of first touch: `pilotflame snapshot record`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ...errors import CacheError, HandlerError, PilotflameError, SnapshotError
from ...snapshot.format.manifest import MANIFEST_NAME, Manifest
from ..functions.requirements import check_requirements
from ..link.worker_spec import WorkerSpec
from ..settings.function_settings import FunctionSettings, read_settings
from . import display, options
from .snapshot import folder_of, read_manifest_of

SHOWN_TENSORS = 5
START_TIMEOUT_S = 900.0
REQUIREMENTS_FILE = "requirements.txt"
# The program that sets the function up and calls it, as `python -m` takes it.
_RECORDER = f"{__name__.rpartition('.commands.')[0]}.worker.first_touch"


@click.command()
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--input", "-i", "input_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The event, as JSON.  [default: test_input.json in FOLDER]",
)  # fmt: skip
@options.settings
@options.snapshot
@options.as_json
def record(
    *, folder: Path, input_file: Path | None, settings: tuple[str, ...], snapshot: str | None, as_json: bool
) -> None:
    """Record in which order the function in FOLDER first touches its tensors. They are fetched in this order.

    Sets the function up as a worker does, calls it once, and writes the order into the manifest beside its
    weights. The digest stays. Push the snapshot afterwards. Threads that the handler starts are not observed.

    \b
    Example:
      pilotflame snapshot record my-embeddings --input long_text.json
    """
    overrides = options.FunctionSource(folder, settings, snapshot=snapshot).overrides()
    function = read_settings(folder, overrides=overrides)
    weights = _weights(function, folder)
    manifest = read_manifest_of(weights)
    # Fail before the function runs, not after it.
    if not os.access(weights, os.W_OK):
        raise CacheError(
            f"{weights} is read-only: the order cannot be written.", remedy="Record in a copy of it."
        )
    event = options.read_event(
        input_file or folder / options.INPUT_FILE,
        remedy="Write the event to send into it, as JSON, or name another file with --input.",
    )
    requirements = folder / REQUIREMENTS_FILE
    check_requirements(requirements.read_text(encoding="utf-8") if requirements.is_file() else "")
    with display.spinner(f"calling {function.name}"):
        order = _order(function, folder, weights, event)
    touched = _write(weights, manifest, order)
    never = [tensor.name for tensor in touched.tensors if tensor.name not in set(order)]
    file, first = weights / MANIFEST_NAME, order[:SHOWN_TENSORS]
    facts = {
        "manifest": str(file),
        "digest": touched.digest,
        "touched": len(order),
        "first": first,
        "never": len(never),
    }
    text = (
        f"{len(order)} of {len(touched.tensors)} tensors were touched, first {', '.join(first)}\n"
        f"{len(never)} were not{f': {_some(never)}' if never else ''}\n"
        f"wrote {file}; its digest is still {touched.digest}"
    )
    display.print_result(facts, text, as_json=as_json)


def _weights(settings: FunctionSettings, folder: Path) -> Path:
    """Return the folder of the function's weights on this machine."""
    if settings.snapshot is None:
        raise SnapshotError(
            f"{folder} has no snapshot, so there is nothing to record.",
            remedy='Set `snapshot = "path/to/weights"` in pilotflame.toml, or pass --snapshot.',
        )
    path = settings.snapshot_path(folder)
    if path is None:
        raise SnapshotError(
            f"The snapshot of {folder} is remote ({settings.snapshot_url}).",
            remedy=f"Pull it first: pilotflame snapshot pull {settings.snapshot_url} weights/ "
            f"&& pilotflame snapshot record {folder} --snapshot weights/",
        )
    if not path.exists():
        raise SnapshotError(
            f"snapshot is {settings.snapshot!r}, but {path} does not exist.", remedy="Put the weights there."
        )
    return folder_of(path)


def _write(weights: Path, manifest: Manifest, order: list[str]) -> Manifest:
    if not order:
        raise SnapshotError(
            "The handler touched no tensor of the snapshot.",
            remedy="Restore the module from context.snapshot, and use it on the handler's own thread.",
        )
    touched = manifest.model_copy(update={"first_touch": tuple(order)})
    file = weights / MANIFEST_NAME
    try:
        touched.write(file)
    except OSError as error:
        raise CacheError(
            f"{file} cannot be written: {error.strerror}.", remedy="Record in a copy of the folder."
        ) from error
    return touched


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN_TENSORS
    return ", ".join(names[:SHOWN_TENSORS]) + (f" and {more} more" if more > 0 else "")


def _order(settings: FunctionSettings, folder: Path, weights: Path, event: bytes) -> list[str]:
    """Run the function in a child process, and return the names of tensors in the order it touched them."""
    spec = WorkerSpec(
        function=settings.name, revision="recorded", code=folder.resolve(), handler=settings.handler,
        snapshot=weights, manifest=weights / MANIFEST_NAME, env=settings.env,
    )  # fmt: skip
    request = {"spec": spec.model_dump(mode="json"), "event": event.decode("utf-8", "surrogateescape")}
    output = _run_recorder(request, START_TIMEOUT_S + settings.timeout_s)
    if not output:
        raise HandlerError(
            "The process that ran the function ended without a result.", remedy="Its output is above."
        )
    result = json.loads(output)
    if "error" in result:
        raise PilotflameError.from_wire(result["error"])
    names: list[str] = result["order"]
    return names


def _run_recorder(request: Mapping[str, Any], timeout_s: float) -> bytes:
    """Return what the recorder wrote, empty if it died. What the function prints goes to stderr."""
    result = os.memfd_create("result")
    try:
        subprocess.run(
            [sys.executable, "-m", _RECORDER, str(result)],
            input=json.dumps(request).encode(), stdout=2, pass_fds=(result,), timeout=timeout_s, check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        return os.pread(result, os.fstat(result).st_size, 0)
    except subprocess.TimeoutExpired:
        raise HandlerError(
            f"The function did not answer within {timeout_s:.0f} s.", remedy="Give it a smaller input."
        ) from None
    finally:
        os.close(result)
