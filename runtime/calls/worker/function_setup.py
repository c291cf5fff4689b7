"""Sets up a function in this process: builds its handler, calls its hooks, prepares logging and torch."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ....errors import HandlerBuildError
from ....handlers.contract import Context
from ....handlers.dialect_calls import awaited
from ....handlers.failure import explain
from ....handlers.handler import Handler, Hook
from ....handlers.resolve import resolve
from ....snapshot.adapters import Adapters
from ....snapshot.handle import Snapshot
from ....snapshot.named import Snapshots
from ..leftovers import fork_safety
from ..link.worker_spec import Weights, WorkerSpec
from .compiled_code import keep_compiled_code
from .output import MarkedHandler
from .runner import CallObserver

if TYPE_CHECKING:
    from ....handlers.language_model.declared_prefixes import DeclaredPrefixes

# Weights that are smaller than this are not worth a hint.
HINT_BYTES = 8 << 20
CONFIG = "AutoConfig.from_pretrained(context.snapshot.path)"
# The parts of a transformers pipeline beside its model. Each part is loaded from the model's folder.
PIPELINE_PARTS = ("tokenizer", "image_processor", "feature_extractor", "processor")
WEIGHTS_HINT = """\
{where} holds {mb:.0f} MiB of weights, which were loaded at import. That works, but the memory is held as long as
the function is deployed. With `snapshot = "FOLDER"` (of safetensors files) in pilotflame.toml and these lines, workers
map the weights instead and share them, and `handler` finds the model in context.state.
    def build(context):
        with context.snapshot.skeleton():
            model = {made}.eval()
{piped}        context.snapshot.restore(model{device})
        return {state}
{moved}The template text-embedding (`pilotflame init --template text-embedding`) is a complete example. A handler of RunPod
has no context: its `build` sets a global variable.
"""
# Lines of the hint for a pipeline on a GPU: a pipeline moves its inputs to its own device, which must be the model's.
MOVED = """\
    def setup(context):
        context.state.device = context.state.model.device
"""


@dataclass(frozen=True, slots=True)
class Built:
    """A function after `build`, without its weights. Forked workers inherit it from their zygote.

    `state` is what `build` returned. `snapshots` have planned which weights they will set. `threads` is the
    number of threads that torch and BLAS use in a worker. `import_s` is how long the import took. `prefixes` are the
    prefixes that the function declares, if it declares any.
    """

    handler: Handler
    state: Any
    snapshots: Snapshots | None
    threads: int
    import_s: float = 0.0
    observers: tuple[CallObserver, ...] = ()
    prefixes: DeclaredPrefixes | None = None


def build(
    spec: WorkerSpec, secrets: Mapping[str, str] | None = None, working_directory: Path | None = None
) -> Built:
    """Import the handler, call its `build`, and begin logging. Raise HandlerError if import or `build` fails.

    `secrets` are environment variables of the function and take precedence over its settings. Without a
    `working_directory`, the import runs in the folder of the code.
    """
    began_s = time.monotonic()
    spec = spec.model_copy(update={"env": {**spec.env, **(secrets or {})}})
    os.environ.update(spec.env)
    keeps = _keep_compiled(spec)
    inherited = int(os.environ.get("PILOTFLAME_TORCH_THREADS", "0"))
    threads = spec.threads or inherited or fork_safety.torch_threads()
    os.chdir(working_directory or spec.code)
    begin_logging()
    handler = resolve(spec.code, spec.handler, spec.function, spec.resolver)
    if not keeps:
        _keep_compiled(spec)
    fork_safety.make_torch_single_threaded()
    import_s = time.monotonic() - began_s
    snapshots, prefixes = _snapshots(spec), _prefixes(spec)
    if snapshots is not None:
        # Compare the files before the fork. Forks inherit the result, so each new version is read once for all workers.
        snapshots.check()
    state = None
    if handler.build is not None:
        try:
            context = Context(spec.function, spec.revision, snapshots=snapshots, prefixes=prefixes)
            state = handler.build(context)
        except (Exception, SystemExit) as error:
            raise explain(HandlerBuildError, "build(context)", error, spec.code) from error
        if snapshots is not None:
            snapshots.check()
    default_level()
    return Built(handler, state, snapshots, threads, import_s, tuple(_observers(spec)), prefixes)


def _observers(spec: WorkerSpec) -> Iterator[CallObserver]:
    """Yield the call observers that the gateway's plugins name in `spec`.

    Skip an observer that the function's environment cannot import, and report it on standard error.
    """
    for place in spec.observers:
        module, _, name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)(spec)
        except (ImportError, AttributeError) as error:
            sys.stderr.write(f"calls are not observed by {place}: {error}\n")
            continue
        if found is not None:
            yield found


def _keep_compiled(spec: WorkerSpec) -> bool:
    """Let compilers keep their code if torch is imported. Functions without torch compile nothing, and start within
    milliseconds.
    """
    if spec.compiled is None or "torch" not in sys.modules:
        return False
    os.environ.update({**keep_compiled_code(spec.compiled), **spec.env})
    return True


def _snapshots(spec: WorkerSpec) -> Snapshots | None:
    if not spec.weights:
        return None
    adapters = Adapters(_snapshot(spec, one) for one in spec.weights if one.on_use)
    return Snapshots((_snapshot(spec, one) for one in spec.weights if not one.on_use), adapters)


def _prefixes(spec: WorkerSpec) -> DeclaredPrefixes | None:
    if (kept := spec.prefixes) is None:
        return None
    from ....handlers.language_model.declared_prefixes import DeclaredPrefixes  # noqa: PLC0415  as in `_snapshot`
    from ....snapshot.computed import ComputedSnapshots  # noqa: PLC0415

    return DeclaredPrefixes(kept.declared, spec.code, ComputedSnapshots(kept.folder, kept.limit_bytes))


def _snapshot(spec: WorkerSpec, weights: Weights) -> Snapshot:
    from ....snapshot.format.manifest import Manifest  # noqa: PLC0415  only functions with weights need it

    return Snapshot(
        weights.root, Manifest.read(weights.manifest), name=weights.name, versions=weights.versions,
        assets=weights.assets, cache=weights.cache, mounted=weights.mounted, parks=spec.parks, gpus=spec.resources.gpus or 0,
    )  # fmt: skip


def weights_hint(code: Path) -> str:
    """If a file below `code` has loaded weights at import, return how a snapshot could be used instead; else "".

    Such a handler works, but its zygote holds the weights for as long as the function is deployed.
    """
    if (torch := sys.modules.get("torch")) is None:
        return ""
    for module in [module for module in list(sys.modules.values()) if _is_below(module, code)]:
        for name, value in vars(module).items():
            # A pipeline of transformers has its module in `model`. Read the attribute statically, because other objects
            # may run code when it is read.
            found = [value, inspect.getattr_static(value, "model", None)]
            for model in (one for one in found if issubclass(type(one), torch.nn.Module)):
                held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
                if held_bytes >= HINT_BYTES:
                    where, mb = f"`{name}` in {Path(str(module.__file__)).name}", held_bytes / (1 << 20)
                    made, piped = _made(module, type(model)), _piped(value)
                    state = "pipe" if piped else "model"
                    on_gpu = any(tensor.is_cuda for tensor in model.parameters())
                    device, moved = (', device="auto"' if on_gpu else ""), (MOVED if piped and on_gpu else "")
                    return WEIGHTS_HINT.format(
                        where=where, mb=mb, made=made, piped=piped, state=state, device=device, moved=moved
                    )
    return ""


def _made(module: ModuleType, kind: type) -> str:
    """Return an expression that makes a model of class `kind`. If `module` has an Auto class for such models, use that class."""
    library = kind.__module__.partition(".")[0]
    if library == "sentence_transformers":
        return f"AutoModel.from_config({CONFIG})"
    if library != "transformers":
        return f"{kind.__name__}(...)"
    for name, value in vars(module).items():
        # Compare the names of classes, because a look-up of the classes themselves would import all models.
        known = getattr(getattr(value, "_model_mapping", None), "_model_mapping", {})
        if isinstance(value, type) and kind.__name__ in _flat(known.values()):
            return f"{name}.from_config({CONFIG})"
    return f"{kind.__name__}({CONFIG})"


def _flat(names: Iterable[str | tuple[str, ...]]) -> set[str]:
    return {name for entry in names for name in ((entry,) if isinstance(entry, str) else entry) if name}


def _piped(value: object) -> str:
    """If `value` is a transformers pipeline, return the line that makes such a pipeline; else ""."""
    held = getattr(value, "__dict__", {})
    if not type(value).__module__.startswith("transformers.pipelines") or "task" not in held:
        return ""
    parts = "".join(
        f", {part}=str(context.snapshot.path)" for part in PIPELINE_PARTS if held.get(part) is not None
    )
    # Set the CPU. By default, a pipeline would use a GPU, and then the zygote could not fork.
    return f'            pipe = pipeline("{held["task"]}", model=model{parts}, device="cpu")\n'


def _is_below(module: ModuleType, folder: Path) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}")


async def call_hook(handler: Handler, hook: Hook | None, context: Context) -> Any:
    """Call a hook and return its result. A hook of an async handler runs on this loop. For other hooks see `run_hook`."""
    if not handler.kind.on_loop or hook is None:
        return run_hook(hook, context)
    result = hook(context)
    return await result if inspect.isawaitable(result) else result


def run_hook(hook: Hook | None, context: Context) -> Any:
    """Call a hook on this thread, which must run no event loop, and return the result. An async hook gets a new loop."""
    return awaited(hook(context)) if hook is not None else None


def run_without_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine without an event loop and return its result. Raise RuntimeError if it suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("A coroutine that runs without a loop was suspended.")


def warm_up_torch() -> None:
    """Make torch start its thread pool and load its matrix kernels before the first forward pass."""
    if (torch := sys.modules.get("torch")) is None:
        return
    with torch.inference_mode(), torch.device("cpu"):
        square = torch.zeros(128, 128)
        torch.nn.functional.linear(square, square)
        torch.zeros(1 << 17).add_(1)


class _Default(int):
    """The root logger's level if nothing sets it. Compare it with `is`: a level of the same number that the function's code sets
    is another object.
    """


DEFAULT_LEVEL = _Default(logging.WARNING)


def begin_logging() -> None:
    """Write log lines for which the function's code has no logging handler to standard error, which is the function's log.

    Add no handler to the root logger, so that the code can still configure the module logging.
    """
    logging.lastResort = MarkedHandler()
    if (root := logging.getLogger()).level == DEFAULT_LEVEL:
        root.setLevel(DEFAULT_LEVEL)


def default_level() -> None:
    """Log lines from INFO on, unless the function's code has set a level or handlers."""
    root = logging.getLogger()
    if root.level is DEFAULT_LEVEL and not root.handlers:
        root.setLevel(logging.INFO)
