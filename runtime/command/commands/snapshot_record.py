"""The command that records the order of first touch: `pilotflame snapshot record`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ....errors import CacheError, HandlerError, PilotflameError, SnapshotError
from ....handlers.recognise import installed_dialects
from ....snapshot.format.manifest import MANIFEST_NAME, Manifest
from ....snapshot.handle import is_adapter
from ...calls.link.worker_spec import Weights, WorkerSpec
from ...ground.settings.function_settings import FunctionSettings, read_settings, setting_of
from ...node.packaging.requirements import check_requirements
from ..client import display, options
from ..client.snapshots import folder_of, read_manifest_of

T = TypeVar("T")
SHOWN_TENSORS = 5
REQUIREMENTS_FILE = "requirements.txt"
# This module sets the function up and calls it. `_run_recorder` runs it with `python -m`.
_RECORDER = f"{__name__.rpartition('.command.')[0]}.calls.worker.first_touch"


@click.command()
@options.function_source
@click.option(
    "--input", "-i", "input_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The event, as JSON.  [default: test_input.json in FOLDER]",
)  # fmt: skip
@options.as_json
def record(*, source: options.FunctionSource, input_file: Path | None, as_json: bool) -> None:
    """Record in which order a function first touches its tensors. They are fetched in this order.

    Sets the function in FOLDER up as a worker does, calls it once, and writes the order into the manifests
    beside its weights. The digests do not change. Push the snapshot afterwards. The command does not observe threads
    that the handler starts.

    Example: pilotflame snapshot record my-embeddings --input long_text.json
    """
    folder = source.folder
    function = read_settings(folder, overrides=source.overrides())
    weights = _weights(function, folder)
    manifests = {name: read_manifest_of(path) for name, path in weights.items()}
    # Check this before the call, because the function may run for a long time.
    for path in weights.values():
        if not os.access(path, os.W_OK):
            raise CacheError(f"{path} is read-only.", remedy="Record the order in a copy of it.")
    remedy = "Write the event to send into it, as JSON, or name another file with --input."
    event = options.read_event(input_file or folder / options.INPUT_FILE, remedy=remedy)
    requirements = folder / REQUIREMENTS_FILE
    text = requirements.read_text(encoding="utf-8") if requirements.is_file() else ""
    check_requirements(text, stood_in=installed_dialects().stands_in)
    with display.spinner(f"calling {function.name}"):
        orders = _orders(function, folder, weights, event)
    if not any(orders.values()):
        remedy = "Restore the module from context.snapshot or context.snapshots, and use it on the handler's own thread."
        raise SnapshotError("The handler touched no tensor of the snapshot.", remedy=remedy)
    told = {name: _told(weights[name], manifests[name], orders.get(name, [])) for name in weights}
    facts = {name: one[0] for name, one in told.items()}
    text = "\n".join(f"{name}: {one[1]}" if name else one[1] for name, one in told.items())
    display.print_result(facts.get("", {"snapshots": facts}), text, as_json=as_json)


def _told(weights: Path, manifest: Manifest, order: list[str]) -> tuple[dict[str, Any], str]:
    """Write the order in which tensors were touched into the manifest of their snapshot. Return the facts for --json, and the text for people.

    If no tensor was touched, leave the manifest unchanged.
    """
    touched = _write(weights, manifest, order) if order else manifest
    never = [tensor.name for tensor in touched.tensors if tensor.name not in set(order)]
    file, first = weights / MANIFEST_NAME, order[:SHOWN_TENSORS]
    facts = {
        "manifest": str(file), "digest": touched.digest, "touched": len(order), "first": first,
        "never": len(never),
    }  # fmt: skip
    more = f" and {len(never) - SHOWN_TENSORS} more" if len(never) > SHOWN_TENSORS else ""
    wrote = f"wrote {file}; its digest is still {touched.digest}" if order else f"{file} stays as it was"
    return facts, (
        f"{len(order)} of {len(touched.tensors)} tensors were touched{', first ' if order else ''}{', '.join(first)}\n"
        f"{len(never)} were not{': ' if never else ''}{', '.join(never[:SHOWN_TENSORS])}{more}\n{wrote}"
    )


def _weights(settings: FunctionSettings, folder: Path) -> dict[str, Path]:
    """Return the folders of the function's weights, by name. Raise SnapshotError if a folder is not on this machine."""
    if not settings.all_snapshots:
        remedy = 'Set `snapshot = "path/to/weights"` in pilotflame.toml, or pass --snapshot.'
        raise SnapshotError(f"{folder} has no snapshot, so there is nothing to record.", remedy=remedy)
    for name, url in _at_start(settings.snapshot_urls).items():
        then = f"set `{setting_of(name)}` to weights/" if name else "pass --snapshot weights/"
        remedy = f"Pull it first: pilotflame snapshot pull {url} weights/, then {then}."
        raise SnapshotError(
            f"The snapshot {f'{name!r} ' if name else ''}of {folder} is remote ({url}).", remedy=remedy
        )
    found = _at_start(settings.snapshot_paths(folder))
    for name, path in found.items():
        if not path.exists():
            missing = f"{setting_of(name)} is {settings.all_snapshots[name]!r}, but {path} does not exist."
            raise SnapshotError(missing, remedy="Put the weights there.")
    return {name: folder_of(path) for name, path in found.items()}


def _at_start(snapshots: dict[str, T]) -> dict[str, T]:
    """Return the snapshots except adapters. Adapters are fetched whole, so the order of their tensors does not matter."""
    return {name: one for name, one in snapshots.items() if not is_adapter(name)}


def _write(weights: Path, manifest: Manifest, order: list[str]) -> Manifest:
    touched, file = manifest.model_copy(update={"first_touch": tuple(order)}), weights / MANIFEST_NAME
    try:
        touched.write(file)
    except OSError as error:
        failed = f"{file} cannot be written: {error.strerror}."
        raise CacheError(failed, remedy="Record in a copy of the folder.") from error
    return touched


def _orders(
    settings: FunctionSettings, folder: Path, weights: dict[str, Path], event: bytes
) -> dict[str, list[str]]:
    """Run the function in a child process. Return the names of each snapshot's tensors in the order of first touch."""
    dialects = installed_dialects()
    entry = dialects.recognise(folder, settings.handler)
    spec = WorkerSpec(
        function=settings.name, revision="recorded", code=folder.resolve(), handler=entry.reference,
        resolver=dialects.resolver(entry),
        weights=tuple(
            Weights(name=name, root=path, manifest=path / MANIFEST_NAME) for name, path in weights.items()
        ),
        env=settings.env,
    )  # fmt: skip
    request = {"spec": spec.model_dump(mode="json"), "event": event.decode("utf-8", "surrogateescape")}
    output = _run_recorder(request, settings.start_timeout_s + settings.timeout_s)
    if not output:
        raise HandlerError("The function's process ended without a result.", remedy="Its output is above.")
    result = json.loads(output)
    if "error" in result:
        raise PilotflameError.from_wire(result["error"])
    orders: dict[str, list[str]] = result["orders"]
    return orders


def _run_recorder(request: Mapping[str, Any], timeout_s: float) -> bytes:
    """Run the recorder and return its result, which is empty if its process died.

    The output of the function goes to stderr. Raise HandlerError if there is no result after `timeout_s`.
    """
    result = os.memfd_create("result")
    try:
        subprocess.run(
            [sys.executable, "-m", _RECORDER, str(result)],
            input=json.dumps(request).encode(), stdout=2, pass_fds=(result,), timeout=timeout_s, check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        return os.pread(result, os.fstat(result).st_size, 0)
    except subprocess.TimeoutExpired:
        slow = f"The function did not answer within {timeout_s:.0f} s."
        raise HandlerError(slow, remedy="Give it a smaller input.") from None
    finally:
        os.close(result)
