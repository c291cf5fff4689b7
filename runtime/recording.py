"""The command that records the order of first touch: `pilotlight snapshot record`."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import display, options

if TYPE_CHECKING:
    from ..handlers.contract import Context
    from ..snapshot.attached import Snapshot
    from ..snapshot.manifest import Manifest
    from .settings import FunctionSettings
    from .spec import WorkerSpec
    from .worker import Built

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
      pilotlight snapshot record my-embeddings --input long_text.json
    """
    from .requirements import check_requirements  # noqa: PLC0415  packaging takes time to import
    from .settings import read_settings  # noqa: PLC0415  pydantic too

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
    from ..errors import SnapshotError  # noqa: PLC0415

    if settings.snapshot is None:
        raise SnapshotError(
            f"{folder} has no snapshot: nothing of it can be recorded.",
            remedy='Set `snapshot = "path/to/weights"` in pilotlight.toml, or give --snapshot.',
        )
    path = settings.snapshot_path(folder)
    if path is None:
        raise SnapshotError(
            f"The snapshot of {folder} is remote ({settings.snapshot_url}).",
            remedy=f"Pull it first: pilotlight snapshot pull {settings.snapshot_url} weights/ "
            f"&& pilotlight snapshot record {folder} --snapshot weights/",
        )
    if not path.exists():
        raise SnapshotError(
            f"snapshot is {settings.snapshot!r}, and {path} does not exist.", remedy="Put the weights there."
        )
    return path if path.is_dir() else path.parent


def _file(weights: Path) -> Path:
    from ..snapshot.manifest import MANIFEST_NAME  # noqa: PLC0415

    return weights / MANIFEST_NAME


def _manifest(weights: Path) -> Manifest:
    from ..errors import CacheError  # noqa: PLC0415
    from .contents import read_manifest_of  # noqa: PLC0415

    manifest = read_manifest_of(weights)
    # Said before the function is run for nothing; whether it can be written is known when it is.
    if not os.access(weights, os.W_OK):
        raise CacheError(
            f"{weights} is read-only: the order cannot be kept there.", remedy="Record in a copy of it."
        )
    return manifest


def _event(file: Path) -> bytes:
    from ..errors import CodeError  # noqa: PLC0415

    try:
        return file.read_bytes()
    except OSError as error:
        raise CodeError(
            f"{file} cannot be read: {error.strerror}.",
            remedy="Put the event to send into it, as JSON, or name it by --input.",
        ) from None


def _write(weights: Path, manifest: Manifest, order: list[str]) -> Manifest:
    from ..errors import CacheError, SnapshotError  # noqa: PLC0415

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


# -- the child


def _order(settings: FunctionSettings, folder: Path, weights: Path, event: bytes) -> list[str]:
    """The names in the order in which a child process touched them."""
    from ..errors import HandlerError, PilotlightError  # noqa: PLC0415
    from .spec import WorkerSpec  # noqa: PLC0415

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
        raise PilotlightError.from_wire(told["error"])
    names: list[str] = told["order"]
    return names


def _in_child(order: Mapping[str, Any], timeout_s: float) -> bytes:
    """What the child answered; nothing if it died. What the function prints goes to standard error."""
    from ..errors import HandlerError  # noqa: PLC0415

    memory = os.memfd_create("answer")
    try:
        subprocess.run(
            [sys.executable, "-m", f"{__package__}.recording", str(memory)],
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


def main() -> None:
    """`python -m pilotlight.runtime.recording DESCRIPTOR`, with the order on standard input: the child."""
    from ..errors import PilotlightError  # noqa: PLC0415
    from .spec import WorkerSpec  # noqa: PLC0415

    order = json.load(sys.stdin)
    try:
        manifest = _live(
            WorkerSpec.model_validate(order["spec"]), order["event"].encode("utf-8", "surrogateescape")
        )
        answer: dict[str, Any] = {"order": list(manifest.first_touch)}
    except PilotlightError as error:
        answer = {"error": error.to_wire()}
    with os.fdopen(int(sys.argv[1]), "wb", closefd=False) as stream:
        stream.write(json.dumps(answer).encode())


def _live(spec: WorkerSpec, body: bytes) -> Manifest:
    """A worker's life, as far as its first answer."""
    from .worker import configure_logging, prime  # noqa: PLC0415
    from .zygote import build  # noqa: PLC0415

    configure_logging()
    built = build(spec)
    snapshot = built.snapshot
    if snapshot is None:
        raise RuntimeError("a recording without a snapshot")
    snapshot.open()
    prime()
    event = built.handler.input.decode(body)
    if built.handler.kind.on_loop:
        return snapshot.record(lambda: asyncio.run(_first_call(spec, built, snapshot, event)))
    return snapshot.record(lambda: _drive(_first_call(spec, built, snapshot, event)))


def _drive(run: Any) -> None:
    """Runs what awaits nothing but its own hooks, without a loop around the handler: it may want one itself."""
    try:
        run.send(None)
    except StopIteration:
        return
    raise RuntimeError("a plain handler's run waited")


async def _first_call(spec: WorkerSpec, built: Built, snapshot: Snapshot, event: Any) -> None:
    from ..errors import HandlerFailed, HandlerSetupError  # noqa: PLC0415
    from ..handlers.contract import Context  # noqa: PLC0415
    from ..handlers.failure import explain  # noqa: PLC0415

    handler, state = built.handler, built.state
    try:
        if handler.setup is not None:
            answer = handler.setup(Context(spec.function, spec.revision, state=state, snapshot=snapshot))
            if inspect.isawaitable(answer):
                answer = await answer if handler.kind.on_loop else asyncio.run(_await(answer))
            state = state if answer is None else answer
    except (Exception, SystemExit) as error:
        raise explain(HandlerSetupError, "Setting up a worker", error, spec.code) from error
    context = Context(
        spec.function, spec.revision, invocation_id="recording", state=state, snapshot=snapshot,
        deadline_s=time.monotonic() + START_TIMEOUT_S,
    )  # fmt: skip
    try:
        await _call(built, context, event)
    except (Exception, SystemExit) as error:
        raise explain(HandlerFailed, "The handler", error, spec.code) from error


async def _call(built: Built, context: Context, event: Any) -> None:
    """One event through the handler, of whatever kind; an answer that is an exception is raised."""
    from ..handlers.contract import Context  # noqa: PLC0415

    handler = built.handler
    if handler.batch is not None:
        event = [event]
        context = Context(
            context.function, context.revision, invocation_id=context.id, state=context.state,
            snapshot=context.snapshot, items=[context],
        )  # fmt: skip
    answer = handler.call(event, context) if handler.takes_context else handler.call(event)
    if handler.kind.value == "async_generator":
        async for _ in answer:
            pass
    elif handler.kind.value == "generator":
        for _ in answer:
            pass
    else:
        if handler.kind.on_loop:
            answer = await answer
        if (
            handler.batch is not None
            and answer
            and isinstance(answer, (list, tuple))
            and isinstance(answer[0], Exception)
        ):
            raise answer[0]


async def _await(awaitable: Any) -> Any:
    return await awaitable


COMMANDS = (record,)

if __name__ == "__main__":
    main()
