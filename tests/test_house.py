"""The house: facts about the source tree that no linter holds. Which room may import which is in pyproject.toml."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pilotflame
import pytest
from pilotflame.handlers.stand_in import CHILDREN

ROOT = Path(__file__).parents[1]
HOUSE = ("handlers", "runtime", "snapshot")
PACKAGES = (*HOUSE, "templates")
# The package contains the tests of a dialect, because other packages with plugins run them.
TESTING = "runtime.testing"
# Modules that write to the terminal.
SPEAKING = {
    "runtime.cli",
    "runtime.command.client.display",
}
# Packages that are loaded only when they are used.
HEAVY = {"aiohttp", "boto3", "httpx", "numpy", "pydantic", "safetensors", "torch", "transformers", "uvloop"}


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "infra" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


house, weight = _load("house"), _load("weight")
# Names of types with two definitions. The list only shrinks.
TWO_DEFINITIONS = {"Handler", "Source"}
# The largest number of lines of code in a room.
MOST_LINES = 2660


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package except the face."""
    loose = {path.stem: path for path in ROOT.glob("*.py") if path.stem != "__init__"}
    return loose | house.House(ROOT).paths | {"templates": ROOT / "templates" / "__init__.py"}


@cache
def figures() -> Any:
    return house.House(ROOT).figures()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file. A test looks at every file in one case, since 730 cases take longer than
    their checks.
    """
    return list(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees_given_back() -> Iterator[None]:
    """Drop the trees: later tests of the process count objects, and the garbage collector would visit all of
    them.
    """
    yield
    tree.cache_clear()
    nodes.cache_clear()


# -- figures


def test_the_figures_are_within_their_limits() -> None:
    found = figures()
    assert found.boxes <= 22
    assert found.floors <= 12
    assert found.arrows <= 110
    assert found.loose_modules == ["runtime.cli", "runtime.main"]
    assert found.package_cycles == []
    assert found.repeated_types.keys() == TWO_DEFINITIONS, (
        "the name of a class or an alias occurs once in the tree"
    )
    small = f"put a small module into the module that imports it: {found.small_modules}"
    # vLLM loads one of the small modules, `cpu_worker`, by its name.
    assert len(found.small_modules) <= 14, small
    assert found.function_lines_median <= 7
    assert found.function_lines_p90 <= 20


def test_classes_protocols_and_aliases_are_types() -> None:
    text = """
    LIMIT, T = 3, TypeVar("T")
    Send: TypeAlias = Callable[[bytes], None]
    Receive = Callable[[], bytes]
    UserId = NewType("UserId", int)
    Point = TypedDict("Point", {"x": int})
    class Reader(Protocol): ...
    if TYPE_CHECKING:
        Row = tuple[int, ...]
    def connect():
        class Connection(HTTPConnection):
            Pool = None
        Local = 3
    """
    types = {"Send", "Receive", "UserId", "Point", "Reader", "Row", "Connection"}
    assert house.types_of(ast.parse(textwrap.dedent(text))) == types


def test_no_room_is_larger_than_one_person_can_hold() -> None:
    large = {room: count for room, count in weight.rooms(ROOT).items() if count > MOST_LINES}
    assert large == {}


def test_every_package_says_what_it_is_and_holds_no_code() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py":
            assert len(tree(path).body) == 1 or name == TESTING, name
            assert ast.get_docstring(tree(path)), name


# Leave out the modules in these folders: child processes import them as packages of their own.
INNER = sorted(name for name in modules() if CHILDREN not in name.split("."))


def test_imports_within_the_package_are_relative_and_skip_the_face() -> None:
    for name in INNER:
        depth = len(modules()[name].relative_to(ROOT).parts)
        for node in nodes(modules()[name]):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("pilotflame")], name
            elif isinstance(node, ast.ImportFrom):
                assert node.level or not (node.module or "").startswith("pilotflame"), name
                assert (
                    node.level < depth
                    or node.module
                    or {alias.name for alias in node.names} <= set(modules())
                ), f"the face, in {name}"


def test_a_worker_loads_nothing_heavy() -> None:
    loaded = python("import json, sys, pilotflame.zygote; print(json.dumps(sorted(sys.modules)))")
    assert not {name.partition(".")[0] for name in loaded} & {"aiohttp", "boto3", "httpx", "numpy", "torch"}


def test_a_gateway_that_stores_files_loads_no_client_of_postgresql() -> None:
    loaded = python("import json, sys, pilotflame.runtime.main; print(json.dumps(sorted(sys.modules)))")
    assert not {name.partition(".")[0] for name in loaded} & {"psycopg", "psycopg_binary"}


# -- the face and the package


def test_the_face_is_short_and_sorted() -> None:
    names = [
        "AsyncClient",
        "Client",
        "Context",
        "Delta",
        "EmbeddingRequest",
        "GenerationRequest",
        "PilotflameError",
        "RerankRequest",
        "Tensor",
        "TokenEmbeddingRequest",
        "__version__",
        "batch",
        "language_model",
    ]
    assert pilotflame.__all__ == sorted(names)
    assert all(hasattr(pilotflame, name) for name in pilotflame.__all__)


def python(text: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text)],
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_face_loads_nothing_heavy() -> None:
    loaded = python("import json, sys, pilotflame; print(json.dumps(sorted(sys.modules)))")
    assert not {name.partition(".")[0] for name in loaded} & HEAVY


def test_every_file_can_be_imported_first() -> None:
    """No import relies on a file that was loaded before."""
    loaded = python(f"""
        import importlib, json
        names = {sorted(f"pilotflame.{name}" for name in modules())!r}
        print(json.dumps([importlib.import_module(name).__name__ for name in names]))
    """)
    assert len(loaded) == len(modules())
    assert figures().load_cycles == []
    assert figures().import_cycles == []


# The private names of libraries that the product uses, each with the reason. The list only shrinks.
PRIVATE_NAMES = {
    # torch
    "_disable_dynamo": "no public name excludes a method of a mode from compilation, with the frames that it calls",
    "_dynamo": "no public name says whether torch's compiler is imported",
    "_python_dispatch": "TorchDispatchMode has no public module",
    "_make_subclass": "nn.Parameter calls it, and it fits a subclass whose __new__ has other arguments",
    "_parameters": "named_parameters returns no owners, and nn.Module.__setattr__ takes longer than making a view",
    "_buffers": "as _parameters",
    "_non_persistent_buffers_set": "no public name says which buffers a state has",
    "_is_mkldnn_bf16_supported": "no public name says for which types oneDNN has a fast product on this processor",
    "_is_mkldnn_fp16_supported": "as _is_mkldnn_bf16_supported",
    # numpy
    "_rand": "the generator behind numpy.random's functions has no public name",
    "_bit_generator": "RandomState has no public name for it",
    "_seed_seq": "BitGenerator.seed_seq is missing before numpy 1.25",
    # transformers: the table of models; its public names import a model's module
    "_model_mapping": "the public names of an AutoModel import the module of a model",
    "_keep_in_fp32_modules": "no public name says which weights stay in float32",
    "_keep_in_fp32_modules_strict": "as _keep_in_fp32_modules",
    # botocore
    "_manager": "no setting names the class of its connections, by which addresses are checked",
    # tensorizer
    "_metadata": "the public names return tensors, and not where their bytes are",
    # multiprocessing
    "_config": "it keeps the folder of its files there, and has no other way to change it",
    "_handle": "a Connection returns its descriptor only if it is open",
    # httpx
    "_main": "httpx imports its own command line, with rich and pygments",
}


def test_the_private_names_of_libraries_are_listed() -> None:
    found = set[str]()
    for path in modules().values():
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'getattr\([^"\n]*"(_[a-z]\w*)"', text)) | set(
            re.findall(r'"[a-z]+\.(_[a-z]+)"', text)
        )
        for line in text.splitlines():
            if "# noqa: SLF001" in line:
                found |= set(re.findall(r"(?<!self)\.(_[a-z]\w*)", line))
            elif re.match(r" *(from|import) [a-z]", line):
                found |= set(re.findall(r"\.(_[a-z]\w*)", line))
    # These are reads of an attribute of another object of the same class.
    assert found - {"_found", "_snapshots"} == PRIVATE_NAMES.keys()


def test_no_file_is_loaded_under_two_names() -> None:
    names: dict[Path, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        ours = path.is_relative_to(ROOT) or name.split(".")[0] == "pilotflame"
        if ours and module is not sys.modules.get(names.get(path, "")):
            assert path not in names, f"{path} is both {names[path]} and {name}"
            names[path] = name
    package = Path(pilotflame.__file__).resolve().parent
    for path, name in names.items():
        if path.is_relative_to(package):
            assert name.split(".")[0] == "pilotflame", f"{path} is loaded as {name}"
    assert package == ROOT or ROOT / "__init__.py" not in names, "the working tree is loaded beside the wheel"


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_readme_names_the_python_that_is_required() -> None:
    least = pyproject()["project"]["requires-python"].removeprefix(">=")
    assert f"Python {least} or later" in (ROOT / "README.md").read_text()


def test_the_packages_listed_are_the_folders() -> None:
    folders = [
        path.parent.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    ]
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(
        ["pilotflame", *(".".join(("pilotflame", *folder.parts)) for folder in folders)]
    )
    for package in HOUSE:
        for path in (ROOT / package).rglob("*.py"):
            inner = path.parent.name != CHILDREN
            assert path.with_name("__init__.py").exists() == inner, f"{path.parent} has no __init__.py"


def test_every_templates_every_file_is_packed() -> None:
    ours = {
        path.relative_to(ROOT)
        for path in (ROOT / "templates").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    package = Path(pilotflame.__file__).parent
    packed = {path.relative_to(package) for path in (package / "templates").rglob("*") if path.is_file()}
    assert ours <= packed


def test_the_version_is_in_one_place() -> None:
    assert "version" in pyproject()["project"]["dynamic"]
    assert pilotflame.__version__ == tree(ROOT / "_version.py").body[-1].value.value  # type: ignore[attr-defined]


# -- what no file may do

SOURCES = sorted([*modules().items(), ("__init__", ROOT / "__init__.py")])
# Functions that catch BaseException without raising it: (file, function).
SWALLOWED = {
    # The caller gets the error, and the thread continues.
    ("runtime.calls.worker.thread_runner", "_execute"),
    ("runtime.calls.worker.thread_runner", "_execute_batch"),
    ("handlers.language_model.pass_slices", "_work"),
    # No call runs, so no caller waits for the error, which goes to the log.
    ("runtime.calls.worker.thread_runner", "_next"),
    # All callers get the error, and the worker ends.
    ("handlers.language_model.engine", "_work"),
    # The supervisor raises the error again.
    ("runtime.calls.worker.owned_thread", "_own"),
    ("snapshot.fetching.fetch", "_work"),
}


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                yield node.name, inner


def called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_nobody_sleeps_pickles_or_asserts() -> None:
    for name, path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call):
                line, function = f"{name}, line {node.lineno}", called(node)
                assert function not in ("time.sleep", "sleep"), f"{line}: wait for an event"
                # For a delay of zero uvloop's `call_later` returns a handle without `when`.
                assert not function.endswith(".when"), f"{line}: keep the time yourself"
            asserts = isinstance(node, ast.Assert) and not name.startswith(TESTING)
            assert not asserts, f"{name}, line {node.lineno}: raise an error of the tree"  # type: ignore[attr-defined]
            if isinstance(node, ast.Import):
                banned = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                banned = {(node.module or "").partition(".")[0]} if not node.level else set()
            else:
                banned = set()
            assert not banned & {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}, name


def test_errors_are_of_the_tree_and_none_is_swallowed() -> None:
    for name, path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = ast.unparse(node.exc).partition("(")[0]
                assert raised not in ("Exception", "BaseException"), f"{name}, line {node.lineno}"
        for function, node in functions(path):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or "BaseException" in ast.unparse(node.type)
            ):
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                assert raises or (name, function) in SWALLOWED, f"{name}, line {node.lineno}"


def test_nobody_prints_but_the_command_line() -> None:
    for name, path in SOURCES:
        if name not in SPEAKING:
            for node in nodes(path):
                assert called(node) != "print", f"{name}, line {node.lineno}"  # type: ignore[attr-defined]


# Timers of the rooms that decide about workers or feed the decisions. Each comment says what another timer does.
TIMERS = {
    "runtime/node/reconciling/reconciler.py": 1,
    # Writes what was learned to the disk.
    "runtime/node/reconciling/function_histories.py": 1,
    # Measures memory, and listens to the kernel's memory pressure again.
    "runtime/node/measuring/node_memory.py": 1,
    "runtime/node/measuring/memory_pressure.py": 1,
    "runtime/node/measuring/idle_memory_limit.py": 2,
    # The wall clock of schedules, and the windows after calls of other functions.
    "runtime/node/functions/prewarming.py": 2,
    # Writes the load and the arrivals to the disk.
    "runtime/node/measuring/recorder.py": 1,
    # Ends the calls of a retiring revision when the gateway ends.
    "runtime/node/reconciling/drain.py": 1,
}


# The input that these modules validate is the gateway's own, a deployer's, or short.
OWN_INPUT = {
    "foreign_json", "handlers.language_model.declared_prefixes", "handlers.language_model.prefix_builder",
    "runtime.ground.storing.private_files", "runtime.command.commands.snapshot_prefixes",
    "runtime.plugins.cog.cog_yaml",
}  # fmt: skip


def test_no_caller_makes_the_gateway_describe_every_error() -> None:
    """pydantic's `errors()` describes all of them: 1 s and 400 MB for 400,000. `first_errors` is for callers' input."""
    found = {name for name, path in modules().items() if ".errors(" in path.read_text(encoding="utf-8")}
    assert found == OWN_INPUT


# The JSON that these modules parse is the gateway's own, short, counted (`foreign_json`), or in the process
# of the function.
PARSED = {
    # Bodies and outputs, which are counted.
    "handlers.codec", "handlers.tensors", "runtime.front.http.requests", "runtime.jobs.events.consumer",
    "runtime.front.generation.token_counts", "runtime.plugins.runpod.openai_jobs", "runtime.plugins.torchserve.handler",
    "runtime.plugins.aws_lambda.handler", "runtime.calls.link.frames", "runtime.node.packaging.reuse",
    # JSON strings only: a text in quotation marks.
    "runtime.plugins.amazon.event_stream", "runtime.plugins.replicate.stream",
    # A header, and a text of at most 64 KiB.
    "runtime.plugins.aws_lambda.routes", "runtime.plugins.oip.repository",
    # The entries that the request log keeps of a call, parsed in a thread.
    "runtime.plugins.request_log.records",
    # Outputs of a handler, in its own process.
    "handlers.dialect_calls", "handlers.language_model.answer_form", "handlers.language_model.answer_parts", "runtime.plugins.cog.handler", "runtime.plugins.cog.metrics",
    "runtime.plugins.runpod.handler", "runtime.plugins.runpod.validator", "runtime.plugins.torchserve.sdk",
    # Messages of a worker to its engine process.
    "handlers.vllm_engine.engine_process",
    # Files and answers of the gateway, and files of a deploy with a limit of size.
    "handlers.language_model.adapters", "handlers.language_model.declared_prefixes", "handlers.sampling.generation_defaults",
    "handlers.language_model.prefixes", "handlers.source_file", "runtime.front.api.openapi", "runtime.plugins.predictions.prediction",
    "runtime.plugins.predictions.predictor_schema", "runtime.plugins.predictions.requests", "runtime.plugins.replicate.file_store",
    "runtime.calls.serving.latency_curve_store", "runtime.node.packaging.snapshots", "runtime.plugins.replicate.problem",
    "runtime.plugins.replicate.shared_files", "runtime.plugins.sagemaker.pending_answers", "runtime.plugins.torchserve.dialect",
    # Responses of servers of snapshots, counted (`foreign_json`, `bulk_fault`) or at most 64 KiB.
    "snapshot.sources.http", "snapshot.registries.artifact", "snapshot.registries.mlflow", "snapshot.format.header",
    "snapshot.format.layout", "snapshot.format.manifest", "snapshot.format.signature",
    # Files and processes of the gateway's user, and other gateways.
    "snapshot.peering.peer", "snapshot.registries.login", "snapshot.sources.google", "snapshot.caching.follow", "snapshot.caching.related",
    # Commands.
    "runtime.plugins.bulk.journal", "runtime.plugins.bulk.submitter", "runtime.plugins.images.image_engine",
}  # fmt: skip


def test_no_request_is_parsed_before_its_values_are_counted() -> None:
    """20 MB of `[[],[],...]` hold the interpreter for 2 s: `load_json` and `load_output` count the values first."""
    parses = re.compile(r"\bjson\.loads?\b|validate_json\b|from_json\(")
    rooms = (
        "handlers.", "runtime.front.http.", "runtime.front.api.", "runtime.front.generation.", "runtime.jobs.events.", "runtime.plugins.",
        "runtime.calls.link.", "runtime.calls.serving.", "runtime.node.packaging.", "snapshot.",
    )  # fmt: skip
    texts = {
        name: path.read_text(encoding="utf-8") for name, path in modules().items() if name.startswith(rooms)
    }
    assert {name for name, text in texts.items() if parses.search(text.replace("orjson", "json"))} == PARSED


# The values that these modules validate are the gateway's own, a deployer's or a caller's, counted and with a
# limit, or in the process of the function.
VALIDATED = {
    # `validate` for callers' input, and `validate_output` for outputs of functions.
    "runtime.front.http.requests",
    # Files of the gateway, its settings, and the files of a deploy.
    "runtime.node.packaging.reuse", "runtime.node.reconciling.function_histories", "runtime.ground.storing.private_files",
    "runtime.ground.settings.validation", "runtime.calls.serving.latency_curve_store", "runtime.plugins.sagemaker.pending_answers",
    "runtime.plugins.replicate.file_store", "runtime.plugins.replicate.shared_files", "runtime.plugins.cog.cog_yaml",
    "runtime.calls.link.handler_facts",
    # A body with a limit, one number, and attributes of headers.
    "runtime.ground.access.keys", "runtime.front.generation.token_counts", "runtime.plugins.cloudevents.parsing",
    # In the process of the function.
    "runtime.calls.worker.first_touch", "runtime.calls.worker.zygote", "runtime.plugins.asgi.event_call", "runtime.plugins.cog.inputs",
    "runtime.plugins.cog.handler",
}  # fmt: skip


def test_outputs_are_validated_at_one_place() -> None:
    """`validate_output` fails at the first wrong item, and large outputs pass it in a thread: 2 MB with all errors took 0.5 s."""
    validates = re.compile(r"\b(model_validate(_json)?|validate_(python|json))\(")
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    found = {name for name, text in texts.items() if name.startswith("runtime.") and validates.search(text)}
    commands = {name for name in found if name.startswith("runtime.command.")}
    assert found - commands == VALIDATED


def test_forms_are_parsed_at_one_place() -> None:
    """aiohttp's reader of forms takes 0.2 ms a field, and more than linear time for a boundary that does not come."""
    reads = re.compile(r"\.multipart\(|MultipartReader|\.post\(\)|BytesParser")
    found = {name for name, path in modules().items() if reads.search(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_errors_of_invocations_are_raised_as_copies() -> None:
    """An error that is raised from the future itself keeps the invocation and its body: `Invocation.wait` copies it."""
    awaited = re.compile(r"await [a-z_.]*invocation\.output\b")
    found = {name for name, path in modules().items() if awaited.search(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_one_file_writes_to_the_terminal() -> None:
    """`display` escapes control characters in the output of functions and in callers' texts."""
    writes = re.compile(r"click\.(echo|secho|style)\b")
    found = {name for name, path in modules().items() if writes.search(path.read_text(encoding="utf-8"))}
    assert found == {"runtime.command.client.display"}


def test_one_timer_decides_about_workers() -> None:
    found = Counter[str]()
    rooms = (
        "runtime/node/reconciling",
        "runtime/node/scaling",
        "runtime/node/functions",
        "runtime/node/measuring",
    )
    for path in [
        *(file for room in rooms for file in (ROOT / room).glob("*.py")),
        ROOT / "runtime/calls/serving/revision.py",
    ]:
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        waits = ("call_later", "call_at", "sleep")
        timers = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in waits]
        # `sleep(0)` lets other tasks run.
        found[str(path.relative_to(ROOT))] = sum(ast.unparse(timer.args[0]) != "0" for timer in timers)
    assert {name: count for name, count in found.items() if count} == TIMERS


# By part of a revision, the methods that start and end its processes, and that bring and drop its weights.
VERBS = {
    "pool": {"start", "wake", "park", "stop", "close"},
    "zygote": {"open", "launch", "warm", "rest", "fork", "close", "wait_closed"},
    "standby": {"take", "replenish", "stop", "end"},
    "weights": {"fetch", "fetch_on_use", "release", "drop", "close"},
}  # fmt: skip
# The pool forks the children that it starts while their weights are fetched, and closes both.
OF_POOL = {
    "zygote.fork",
    "standby.take",
    "weights.fetch",
    "zygote.close",
    "zygote.wait_closed",
    "weights.close",
}


def test_only_carry_out_starts_and_ends_processes_and_drops_weights() -> None:
    found = dict[str, set[str]]()
    for path in (ROOT / "runtime/node/reconciling").glob("*.py"):
        for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            match node.func:
                case ast.Attribute(ast.Attribute(attr=part) | ast.Name(id=part), verb):
                    if verb in VERBS.get(part.removeprefix("_"), ()):
                        found.setdefault(path.stem, set()).add(f"{part.removeprefix('_')}.{verb}")
    assert found.pop("pool") == OF_POOL
    assert found.keys() == {"carry_out"}


def test_processes_are_made_and_ended_in_one_room() -> None:
    for path in (ROOT / "runtime").rglob("*.py"):
        if path.parent.name != "reconciling":
            attributes = (
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            )
            assert not any(node.attr == "pool" for node in attributes), path


def test_no_process_is_started_by_a_fork_of_the_gateway() -> None:
    """uvloop starts processes by fork, which stops the event loop while the kernel copies the page tables (started_process.py)."""
    starts = {"create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"}
    for path in [
        path for room in ("runtime", "snapshot", "handlers") for path in (ROOT / room).rglob("*.py")
    ]:
        calls = (node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
        assert not starts & {call.attr for call in calls if isinstance(call, ast.Attribute)}, path


def test_weights_are_never_unpickled_anywhere() -> None:
    folders = ("handlers", "runtime", "snapshot", "templates", "infra", "tests")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        # The name of a call is in the text of its file, so the text is searched first. To unparse all calls
        # takes seconds.
        for node in ast.walk(tree(path)) if re.search(r"\b(torch|pickle)\b", path.read_text()) else ():
            if called(node) in ("torch.load", "pickle.load", "pickle.loads"):
                assert isinstance(node, ast.Call)
                safe = [ast.unparse(given.value) for given in node.keywords if given.arg == "weights_only"]
                assert safe == ["True"], f"{path}, line {node.lineno}"


# The text that each of these patterns over bytes reads has a bound. A pattern over a body of a caller would
# block the interpreter, unlike `find` and `count`.
BYTE_PATTERNS = {
    "runtime/front/generation/token_counts.py": "512 KiB of both ends",
    "runtime/front/http/transport.py": "the head of a request",
    "runtime/plugins/asgi/messages.py": "the head of a response",
    "foreign_json.py": "a run of digits at a place that `find` has found",
}


def test_patterns_over_bytes_read_a_bounded_part() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (*(ROOT / "runtime").rglob("*.py"), ROOT / "foreign_json.py")
        if re.search(r"\bre\.\w+\(\s*r?b[\"']|\bre\.\w+\(\s*br[\"']", path.read_text())
    }
    assert found == BYTE_PATTERNS.keys()


# The number of calls that write JSON or base64, by module. On the event loop, they may write only values with
# a limit.
WRITES = {
    # Large values are written in a thread: `made`, `dumped`, `outputs_response`, `parsed`, `in_turn`.
    "front.api.job_events": 3, "front.generation.answering": 1, "front.generation.deltas": 1,
    "front.http.requests": 1, "front.http.responses": 4, "plugins.anthropic.answers": 1, "plugins.cloudevents.parsing": 1,
    "plugins.cloudevents.reply": 3, "plugins.completions.answers": 1, "plugins.completions.requests": 1, "plugins.oip.grpc_requests": 1,
    "plugins.oip.infer_request": 2, "plugins.openai.encodings": 1, "plugins.openai.response_answers": 1, "plugins.predictions.prediction": 2,
    "plugins.replicate.stream": 1, "plugins.runpod.openai_jobs": 3, "plugins.tgi.answers": 1,
    # Written in the threads of the store, of queues and of files.
    "jobs.events.consumer": 1, "jobs.postgres.group_rows": 1, "jobs.sql.outbox": 1, "jobs.sql.rows": 3,
    "plugins.replicate.shared_files": 1, "plugins.sagemaker.pending_answers": 2,
    "jobs.stored.alert": 1, "jobs.stored.job": 1, "jobs.stored.webhook_body": 1, "plugins.kafka.deliveries": 1, "plugins.replicate.upload": 1,
    "plugins.request_log.record_file": 3, "plugins.sqs.queue": 1, "plugins.sqs.sinks": 1,
    # Errors, whose texts and details have a limit.
    "front.http.event_stream": 1, "plugins.anthropic.errors": 1, "plugins.aws_lambda.failures": 4, "plugins.completions.errors": 2,
    "plugins.oip.errors": 1, "plugins.openai.azure": 1, "plugins.predictions.requests": 1, "plugins.replicate.problem": 1,
    "plugins.sagemaker.async_answers": 1, "plugins.sagemaker.failures": 2, "plugins.tensorflow_serving.errors": 1, "plugins.tgi.errors": 1,
    "plugins.torchserve.errors": 1, "plugins.vertex.routes": 1,
    # The state of functions, keys, jobs (without outputs), logs and files. Lists have no schemas.
    "front.api.admin": 10, "front.api.credentials": 6, "front.api.deploys": 4, "front.api.invoke": 1, "front.api.jobs": 3, "front.api.logs": 1, "front.api.nodes": 1,
    "front.api.openapi": 6, "front.api.revisions": 6, "front.api.usage": 1, "front.api.warmup": 1, "front.api.webhooks": 3,
    "front.pages.console": 4, "front.pages.docs_page": 1, "jobs.webhooks.signing": 2, "plugins.aws_lambda.functions": 4,
    "plugins.aws_lambda.routes": 2, "plugins.cloudevents.routes": 1, "plugins.cog.routes": 8, "plugins.oip.infer_call": 2,
    "plugins.oip.routes": 11, "plugins.openai.routes": 6, "plugins.predictions.predictor_schema": 1, "plugins.replicate.account": 3,
    "plugins.replicate.files": 5, "plugins.replicate.models": 6, "plugins.replicate.routes": 1, "plugins.runpod.routes": 6,
    "plugins.sagemaker.routes": 2, "plugins.tensorflow_serving.kserve": 3, "plugins.tensorflow_serving.routes": 2, "plugins.tgi.routes": 1,
    "plugins.torchserve.management": 4, "plugins.torchserve.routes": 1,
    # Written in the process of the function, or of a command.
    "jobs.moving.state_move": 1, "plugins.asgi.event_call": 2, "plugins.aws_lambda.handler": 4, "plugins.bulk.journal": 1, "plugins.bulk.submitter": 2,
    "plugins.chat.command": 1, "plugins.cog.metrics": 2, "plugins.images.build_context": 1, "plugins.images.recipe": 1,
    "plugins.runpod.handler": 2, "plugins.torchserve.handler": 1,
}  # fmt: skip


def test_outputs_of_any_size_are_written_in_threads() -> None:
    """20 MB of JSON or base64 hold the event loop for 20 ms and more. A new call belongs to a thread, or has a limit."""
    writes = re.compile(r"(?<!def )\b(?:json_response|b64encode|dump_json|dumps|model_dump_json)\(")
    texts = {
        name.removeprefix("runtime."): path.read_text(encoding="utf-8") for name, path in modules().items()
    }
    found = {
        name: len(writes.findall(text))
        for name, text in texts.items()
        if name.startswith(("front.", "jobs.", "plugins."))
    }
    assert {name: count for name, count in found.items() if count} == WRITES


def test_every_file_says_what_it_is() -> None:
    for name, path in [*SOURCES, *((path.name, path) for path in (ROOT / "tests").rglob("test_*.py"))]:
        docstring = ast.get_docstring(tree(path))
        assert docstring, name
        assert docstring.splitlines()[0].rstrip().endswith((".", "`", ":")), name


def test_tests_change_constants_through_monkeypatch() -> None:
    """Otherwise the change would also affect later tests of the process, as a change by vLLM's tests once
    did.
    """
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(tree(path)):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                constant = isinstance(target, ast.Attribute) and target.attr.isupper()
                assert not constant, f"{path.name}, line {node.lineno}: use monkeypatch.setattr"  # type: ignore[attr-defined]


def test_tests_mirror_the_sources() -> None:
    for package in ("handlers", "runtime", "snapshot"):
        for path in (ROOT / "tests" / package).rglob("test_*.py"):
            about = path.stem.removeprefix("test_")
            folders = path.parent.relative_to(ROOT / "tests").parts
            assert ".".join((*folders, about)) in modules() or about in TOGETHER, f"{path} tests no file"


# Names of tests that are about several files at once.
TOGETHER = {
    "any_gateway",
    "real_vllm",
    "shared_faults",
    "shared_limits",
    "environments",
    "ownership",
    "replacement",
    "all_routes",
    "named_adapters",
    "local_histories",
    "engine_histories",
    "architectures",
    "cached_parts",
    "clients",
    "compiled",
    "console_browser",
    "page_isolation_browser",
    "container_limits",
    "reach",
    "cog_cases",
    "corruptions",
    "deployed_bytes",
    "desired_state_over_time",
    "examples",
    "faults",
    "fetcher_registry",
    "policies",
    "unstored",
    "tenants",
    "time_limits",
    "format",
    "hostile",
    "hostile_http",
    "install",
    "parked_workers",
    "pause",
    "resident_weights",
    "large",
    "npm_client",
    "inference_client",
    "other_clients",
    "pypi_client",
    "rollback",
    "schema",
    "templates",
    "tools",
    "container_launcher_ends",
    "container_launcher_pull",
    "container_launcher_s3",
    "fetcher_hub",
    "other_runtimes",
    "fetcher_device",
    "fetcher_peers",
    "fetcher_named",
    "fetcher_s3",
}


def test_the_files_that_documents_name_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(
            r"`((?:runtime|snapshot|handlers|infra|tests|templates)/[\w/.-]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_measures_notice_a_bad_tree(tmp_path: Path) -> None:
    """Show that the measures can fail: each figure notices a tree that breaks its limit."""
    files = {
        "runtime/one.py": "from .a.x import f\n",
        "runtime/a/__init__.py": "",
        "runtime/a/x.py": "from ..b.y import Twice\ndef f():\n    pass\n",
        "runtime/b/__init__.py": "",
        "runtime/b/y.py": "class Twice: ...\ndef late():\n    from ..a import x\n    return x\n",
        "runtime/a/c.py": "if True:\n    from . import d\n",
        "runtime/a/d.py": "from .c import d\n",
        "snapshot/z.py": "class Twice: ...\n",
        **{f"{name}/__init__.py": "" for name in HOUSE},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = house.House(tmp_path).figures()
    assert (found.boxes, found.floors, found.arrows) == (5, 3, 3)
    assert found.loose_modules == ["runtime.one"]
    assert found.package_cycles == [["runtime.a", "runtime.b"]]
    assert found.load_cycles == [["runtime.a.c", "runtime.a.d"]]
    assert found.repeated_types == {"Twice": ["runtime.b.y", "snapshot.z"]}
    assert found.small_modules == ["runtime.a.c", "runtime.a.d", "runtime.b.y"]
    assert (found.function_lines_median, found.function_lines_max, found.lines) == (2.5, 3, 12)
