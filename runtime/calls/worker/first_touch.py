"""Records the order in which a function first reads its tensors.

It sets up the function as a worker does, and calls it once.

`pilotflame snapshot record` runs this in a separate process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from ....errors import HandlerFailed, HandlerSetupError, PilotflameError
from ....handlers.contract import Context
from ....handlers.failure import explain
from ..link.worker_spec import WorkerSpec
from .function_setup import Built, build, call_hook, run_without_loop, warm_up_torch
from .measurement import timed_call

DEADLINE_S = 900.0


def main() -> None:
    """Run `python -m pilotflame.runtime.calls.worker.first_touch DESCRIPTOR`.

    Standard input is JSON with the spec and the event. The response is written to file descriptor DESCRIPTOR.
    """
    request = json.load(sys.stdin)
    spec, body = WorkerSpec.model_validate(request["spec"]), request["event"]
    try:
        response: dict[str, Any] = {"orders": _record(spec, body.encode("utf-8", "surrogateescape"))}
    except PilotflameError as error:
        response = {"error": error.to_wire(private=True)}
    with os.fdopen(int(sys.argv[1]), "wb", closefd=False) as stream:
        stream.write(json.dumps(response).encode())


def _record(spec: WorkerSpec, body: bytes) -> dict[str, list[str]]:
    built = build(spec)
    if built.snapshots is None:
        raise RuntimeError("a recording without a snapshot")
    built.snapshots.open()
    warm_up_torch()
    event = built.handler.input.decode(body)
    run = asyncio.run if built.handler.kind.on_loop else run_without_loop
    recorded = built.snapshots.record(lambda: run(_first_call(spec, built, event)))
    return {name: list(manifest.first_touch) for name, manifest in recorded.items()}


async def _first_call(spec: WorkerSpec, built: Built, event: Any) -> None:
    handler, snapshots = built.handler, built.snapshots
    context = Context(spec.function, spec.revision, state=built.state, snapshots=snapshots)
    try:
        state = await call_hook(handler, handler.setup, context)
    except (Exception, SystemExit) as error:
        raise explain(HandlerSetupError, "Setting up a worker", error, spec.code) from error
    context = Context(
        spec.function, spec.revision, invocation_id="recording", snapshots=snapshots,
        state=built.state if state is None else state, deadline_s=time.monotonic() + DEADLINE_S,
    )  # fmt: skip
    if handler.batch is not None:
        context, event = Context.of_batch([context]), [event]
    try:
        await timed_call(handler, handler.arguments(context, event), 1)
    except (Exception, SystemExit) as error:
        raise explain(HandlerFailed, "The handler", error, spec.code) from error


if __name__ == "__main__":
    main()
