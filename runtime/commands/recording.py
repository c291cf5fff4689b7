"""The command that records the order of first touch: `pilotflame snapshot record`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import display, options

if TYPE_CHECKING:
    from ...snapshot.format.manifest import Manifest
    from ..settings.function_settings import FunctionSettings

FIRST = 5
START_TIMEOUT_S = 900.0
INPUT_FILE = "test_input.json"
REQUIREMENTS_FILE = "requirements.txt"


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
    """Note in which order the function in FOLDER first touches its tensors, so that they are fetched in it.

    Sets the function up as a worker would, calls it once, and writes the manifest beside its weights again with the
    order in it; the digest stays. Push the snapshot after that. What runs on threads of the handler's own is not seen.

    \b
    Example:
      pilotflame snapshot record my-embeddings --input long_text.json
    """
    from ..functions.requirements import check_requirements  # noqa: PLC0415  packaging takes time to import
    from ..settings.function_settings import read_settings  # noqa: PLC0415  pydantic too

    found = read_settings(folder, overrides=options.overrides(settings, None, snapshot, local=True))
    weights = _weights(found, folder)
    manifest = _manifest(weights)
    event = input_file if input_file is not None else folder / INPUT_FILE
    requirements = folder / REQUIREMENTS_FILE
    check_requirements(requirements.read_text(encoding="utf-8") if requirements.is_file() else "")
    with display.waiting(f"calling {found.name}"):
        order = _order(found, folder, weights, _event(event))
    touched = _write(weights, manifest, order)
    never = [tensor.name for tensor in touched.tensors if tensor.name not in set(order)]
    if as_json:
        facts = {"manifest": str(_file(weights)), "digest": touched.digest, "touched": len(order)}
        return display.print_json({**facts, "first": order[:FIRST], "never": len(never)})
    click.echo(
        f"{len(order)} of {len(touched.tensors)} tensors were touched, first {', '.join(order[:FIRST])}"
    )
    click.echo(f"{len(never)} never were{f': {_some(never)}' if never else ''}")
    click.echo(f"wrote {_file(weights)}; its digest is still {touched.digest}")
    return None


def _weights(settings: FunctionSettings, folder: Path) -> Path:
    """The folder of the function's weights on this machine."""
    from ...errors import SnapshotError  # noqa: PLC0415

    if settings.snapshot is None:
        raise SnapshotError(
            f"{folder} has no snapshot: nothing of it can be recorded.",
            remedy='Set `snapshot = "path/to/weights"` in pilotflame.toml, or give --snapshot.',
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
            f"snapshot is {settings.snapshot!r}, and {path} does not exist.", remedy="Put the weights there."
        )
    return path if path.is_dir() else path.parent


def _file(weights: Path) -> Path:
    from ...snapshot.format.manifest import MANIFEST_NAME  # noqa: PLC0415

    return weights / MANIFEST_NAME


def _manifest(weights: Path) -> Manifest:
    from ...errors import CacheError  # noqa: PLC0415
    from .contents import read_manifest_of  # noqa: PLC0415

    manifest = read_manifest_of(weights)
    # Said before the function is run for nothing; whether it can be written is known when it is.
    if not os.access(weights, os.W_OK):
        raise CacheError(
            f"{weights} is read-only: the order cannot be kept there.", remedy="Record in a copy of it."
        )
    return manifest


def _event(file: Path) -> bytes:
    from ...errors import CodeError  # noqa: PLC0415

    try:
        return file.read_bytes()
    except OSError as error:
        raise CodeError(
            f"{file} cannot be read: {error.strerror}.",
            remedy="Put the event to send into it, as JSON, or name it by --input.",
        ) from None


def _write(weights: Path, manifest: Manifest, order: list[str]) -> Manifest:
    from ...errors import CacheError, SnapshotError  # noqa: PLC0415

    if not order:
        raise SnapshotError(
            "The handler touched no tensor of the snapshot.",
            remedy="Restore the module from context.snapshot, and use it on the handler's own thread.",
        )
    touched = manifest.model_copy(update={"first_touch": tuple(order)})
    try:
        touched.write(_file(weights))
    except OSError as error:
        raise CacheError(
            f"{_file(weights)} cannot be written: {error.strerror}.", remedy="Record in a copy of the folder."
        ) from error
    return touched


def _some(names: list[str]) -> str:
    more = len(names) - FIRST
    return ", ".join(names[:FIRST]) + (f" and {more} more" if more > 0 else "")


def _order(settings: FunctionSettings, folder: Path, weights: Path, event: bytes) -> list[str]:
    """The names in the order in which a child process touched them."""
    from ...errors import HandlerError, PilotflameError  # noqa: PLC0415
    from ..link.worker_spec import WorkerSpec  # noqa: PLC0415

    spec = WorkerSpec(
        function=settings.name, revision="recorded", code=folder.resolve(), handler=settings.handler,
        snapshot=weights, manifest=_file(weights), env=settings.env,
    )  # fmt: skip
    order = {"spec": spec.model_dump(mode="json"), "event": event.decode("utf-8", "surrogateescape")}
    answer = _in_child(order, START_TIMEOUT_S + settings.timeout_s)
    if not answer:
        raise HandlerError(
            "The process that ran the function ended without a word.", remedy="Its own words are above."
        )
    told = json.loads(answer)
    if "error" in told:
        raise PilotflameError.from_wire(told["error"])
    names: list[str] = told["order"]
    return names


def _in_child(order: Mapping[str, Any], timeout_s: float) -> bytes:
    """What the child answered; nothing if it died. What the function prints goes to standard error."""
    from ...errors import HandlerError  # noqa: PLC0415

    memory = os.memfd_create("answer")
    try:
        subprocess.run(
            [sys.executable, "-m", "pilotflame.runtime.worker.first_touch", str(memory)],
            input=json.dumps(order).encode(), stdout=2, pass_fds=(memory,), timeout=timeout_s, check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        return os.pread(memory, os.fstat(memory).st_size, 0)
    except subprocess.TimeoutExpired:
        raise HandlerError(
            f"The function did not answer within {timeout_s:.0f} s.", remedy="Give it a smaller input."
        ) from None
    finally:
        os.close(memory)


COMMANDS = (record,)
