"""The house: who imports whom, what is packed, and what no file may do. Read from the sources, not from memory."""

import ast
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pilotflame
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("handlers", "runtime", "snapshot", "templates")
ROOMS = (
    *(f"snapshot.{room}" for room in ("caching", "converting", "fetching", "format", "restoring", "sources")),
    "handlers.foreign",
    *(
        f"runtime.{room}"
        for room in ("access", "api", "batching", "bulk", "commands", "events", "jobs", "webhooks")
    ),
)

# DESIGN section 6. A file imports only from lower lines; one on its own line may not even see its neighbours.
# A new file must be placed here: ask what it may know, and put it no higher than that.
FLOORS = """
0   _version addresses errors handlers runtime snapshot templates
0   snapshot.format snapshot.sources snapshot.fetching snapshot.caching snapshot.restoring snapshot.converting

0   snapshot.format.dtype snapshot.restoring.mismatch snapshot.format.publish snapshot.sources.s3_codes snapshot.restoring.skeleton snapshot.sources.source snapshot.sources.wire
0   snapshot.format.chunk snapshot.sources.exchange snapshot.sources.folder snapshot.format.header snapshot.sources.location snapshot.sources.ranged snapshot.sources.s3_access
0   snapshot.sources.answer snapshot.format.manifest
0   snapshot.sources.http
0   snapshot.sources.s3
0   snapshot.caching.stored
0   snapshot.fetching.arrival snapshot.caching.assets snapshot.fetching.ceiling snapshot.format.damage snapshot.caching.flock snapshot.format.layout snapshot.caching.memory snapshot.sources.locate snapshot.fetching.pace snapshot.fetching.ranges snapshot.format.readers snapshot.caching.spare snapshot.fetching.target
0   snapshot.caching.follow snapshot.caching.resume snapshot.caching.tier
0   snapshot.format.create snapshot.restoring.pin snapshot.restoring.plan snapshot.format.verify
0   snapshot.fetching.landing snapshot.fetching.learned snapshot.restoring.mapping snapshot.converting.origin snapshot.converting.push
0   snapshot.fetching.fetch snapshot.converting.tensorizer_file snapshot.converting.torch_file snapshot.restoring.touch snapshot.converting.writer
0   snapshot.fetching.bench snapshot.converting.convert snapshot.fetching.download snapshot.restoring.gate snapshot.caching.pull snapshot.restoring.record
0   snapshot.caching.cache
0   snapshot.caching.node snapshot.restoring.restore
0   snapshot.attached

1   handlers.foreign
1   handlers.accepted handlers.arrays
1   handlers.codec handlers.contract handlers.failure handlers.foreign.opener handlers.foreign.recognise
1   handlers.foreign.files
1   handlers.handler handlers.loading handlers.foreign.bodies handlers.foreign.cog_sdk handlers.foreign.runpod_sdk
1   handlers.foreign.aws_lambda handlers.foreign.cog_inputs handlers.foreign.runpod
1   handlers.foreign.cog
1   handlers.resolve

2   runtime.access runtime.api runtime.batching runtime.bulk runtime.commands runtime.events runtime.jobs runtime.webhooks
2   runtime.access.private runtime.access.quota runtime.events.calls runtime.events.source runtime.loopback
2   runtime.jobs.database runtime.jobs.identity runtime.jobs.job runtime.jobs.schema
2   runtime.jobs.counters runtime.jobs.rows
2   runtime.jobs.turn
2   runtime.jobs.changes runtime.jobs.expiry runtime.jobs.looks
2   runtime.webhooks.addresses runtime.webhooks.backoff runtime.webhooks.signing
2   runtime.jobs.store runtime.events.bus runtime.events.aws
2   runtime.events.sinks runtime.events.sqs
2   runtime.jobs.message
2   runtime.webhooks.delivery
2   runtime.webhooks.posting
2   runtime.webhooks.outbox
2   runtime.webhooks.courier
2   runtime.batching.calls runtime.batching.curve runtime.batching.promises runtime.batching.returns runtime.batching.turns
2   runtime.batching.admission runtime.batching.gathering
2   runtime.batching.queue
2   runtime.batching.handing
2   runtime.batching.simulator
2   runtime.batching.figures
2   runtime.advance runtime.autoscaler runtime.credit runtime.exhaustion runtime.groups runtime.lineage runtime.logs runtime.packing runtime.spec runtime.timeline runtime.traits runtime.wording
2   runtime.tally
2   runtime.code runtime.invocation runtime.link runtime.metrics runtime.requirements runtime.settings runtime.state_dir
2   runtime.access.keys
2   runtime.access.caller runtime.access.rules runtime.access.vault
2   runtime.access.described runtime.access.door runtime.access.keyring runtime.access.origin
2   runtime.environment runtime.listener runtime.store runtime.unpack runtime.weights

3   runtime.deploy runtime.fetcher runtime.launcher runtime.runner
3   runtime.course runtime.host runtime.measurement
3   runtime.loop_runner runtime.thread_runner
3   runtime.worker
3   runtime.zygote
3   runtime.commands.first_call

4   runtime.alarms runtime.curves runtime.given runtime.policy
4   runtime.replica
4   runtime.pool
4   runtime.line

5   runtime.revision
5   runtime.functions
5   runtime.jobs.board runtime.jobs.order
5   runtime.jobs.attempt
5   runtime.jobs.dispatch
5   runtime.jobs.jobs

6   runtime.api.cloudevents runtime.api.compression runtime.api.intake runtime.api.parts runtime.watch
6   runtime.api.answer runtime.api.deadline
6   runtime.api.event_stream
6   runtime.events.body runtime.api.gateway runtime.api.prediction
6   runtime.events.pump runtime.api.aws_error runtime.api.connection runtime.api.described runtime.api.events
6   runtime.events.sources runtime.access.guard runtime.api.aws_lambda runtime.api.predictions runtime.api.unrouted
6   runtime.api.lane
6   runtime.api.queue
6   runtime.api.described_queue runtime.api.described_webhooks
6   runtime.api.openapi
6   runtime.api.admin
6   runtime.access.control runtime.api.webhooks

7   runtime.commands.display runtime.main
7   runtime.client runtime.commands.doctor runtime.commands.scaffold
7   runtime.bulk.inputs runtime.bulk.journal runtime.commands.contents runtime.commands.options runtime.commands.trace runtime.commands.trial
7   runtime.bulk.asking runtime.bulk.window
7   runtime.commands.bulk
7   runtime.access.home
7   runtime.commands.access
7   runtime.commands.jobs runtime.commands.moves runtime.commands.recording runtime.commands.transfers runtime.commands.webhooks
7   runtime.commands.benches runtime.commands.remote runtime.commands.simulate runtime.commands.snapshots
7   runtime.cli
"""
# The command line's own: they write to the terminal.
SPEAKING = {
    "runtime.commands.benches",
    "runtime.cli",
    "runtime.commands.display",
    "runtime.commands.moves",
    "runtime.commands.recording",
    "runtime.commands.remote",
    "runtime.commands.snapshots",
    "runtime.commands.transfers",
}
# What must not be loaded by those who never use it.
HEAVY = {"aiohttp", "boto3", "httpx", "numpy", "pydantic", "safetensors", "torch", "transformers", "uvloop"}


@cache
def lines() -> dict[str, tuple[int, int]]:
    """Each file's (floor, line)."""
    found: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(FLOORS.splitlines()):
        floor, *names = line.split() or ["0"]
        for name in names:
            assert name not in found, f"{name} stands twice"
            found[name] = (int(floor), number)
    return found


@cache
def modules() -> dict[str, Path]:
    """Every file of the package except the face, as the floors name it."""
    found = {path.stem: path for path in ROOT.glob("*.py") if path.stem != "__init__"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            folders = path.parent.relative_to(ROOT).parts
            if package != "templates" or len(folders) == 1:  # what users start from is no module of ours
                found[".".join(folders if path.stem == "__init__" else (*folders, path.stem))] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(name: str, node: ast.AST) -> Iterator[tuple[str, bool]]:
    """(what is imported, whether it is ours) by every import statement below `node`, type-checking ones too."""
    package = modules()[name].parent.relative_to(ROOT).parts
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from ((alias.name, False) for alias in found.names)
        elif isinstance(found, ast.ImportFrom) and not found.level:
            yield found.module or "", False
        elif isinstance(found, ast.ImportFrom):
            base = package[: len(package) - found.level + 1]
            within = ".".join((*base, *(found.module or "").split("."))).strip(".")
            for alias in found.names:
                inner = f"{within}.{alias.name}".strip(".")
                yield (inner if inner in modules() else within), True


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The import statements that run when the file is imported: not those in functions, nor for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from at_import(child)


def closure(name: str) -> tuple[set[str], set[str]]:
    """(our files, other packages) that importing this file loads."""
    ours, others, left = set[str](), set[str](), [name]
    while left:
        current = left.pop()
        if current in ours:
            continue
        ours.add(current)
        for statement in at_import(tree(modules()[current])):
            for target, own in imports(current, statement):
                if own:
                    left.append(target)
                else:
                    others.add(target.partition(".")[0])
    return ours, others


# -- floors


def test_every_file_has_its_place() -> None:
    assert sorted(modules()) == sorted(lines())


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_file_imports_only_from_below(name: str) -> None:
    for target, own in imports(name, tree(modules()[name])):
        if own:
            assert target, f"{name} imports the face"
            assert target in lines(), f"{name} imports {target}, which is not there"
            assert lines()[target][1] < lines()[name][1], f"{name} imports {target}, which is not below it"
        else:
            assert not target.startswith("pilotflame"), f"{name} imports {target}: relatively, please"


def test_floors_are_in_order() -> None:
    floors = [floor for floor, _ in sorted(lines().values(), key=lambda place: place[1])]
    assert floors == sorted(floors)


def test_the_snapshot_is_useful_alone() -> None:
    for name in modules():
        if name.startswith("snapshot"):
            assert all(
                part.split(".")[0] in ("_version", "errors", "snapshot") for part in closure(name)[0]
            ), name


def test_packages_are_named_and_empty() -> None:
    for package in (*PACKAGES, *ROOMS):
        body = tree(modules()[package]).body
        assert len(body) == 1, package
        assert ast.get_docstring(tree(modules()[package]))


@pytest.mark.parametrize(
    "name",
    [
        "runtime.autoscaler",
        "runtime.batching.admission",
        "runtime.batching.curve",
        "runtime.batching.gathering",
        "runtime.batching.handing",
        "runtime.batching.promises",
        "runtime.batching.queue",
        "runtime.batching.returns",
        "runtime.batching.turns",
        "runtime.advance",
        "runtime.packing",
        "runtime.webhooks.backoff",
        "runtime.timeline",
        "snapshot.restoring.plan",
        "snapshot.fetching.pace",
        "snapshot.fetching.ranges",
    ],
)
def test_decisions_know_no_clock_and_do_no_io(name: str) -> None:
    loaded = {target.partition(".")[0] for target, own in imports(name, tree(modules()[name])) if not own}
    assert not loaded & {"asyncio", "datetime", "io", "os", "pathlib", "random", "socket", "subprocess", "threading", "time"}  # fmt: skip


@pytest.mark.parametrize("name", ["runtime.worker", "runtime.zygote", "runtime.runner"])
def test_workers_load_no_http_and_no_gateway(name: str) -> None:
    ours, others = closure(name)
    assert not others & {"aiohttp", "httpx", "click", "rich", "prometheus_client", "psutil", "torch", "numpy"}
    assert not ours & {
        "runtime.api.gateway",
        "runtime.functions",
        "runtime.revision",
        "runtime.main",
        "runtime.cli",
    }


# -- the face and the package


def test_the_face_is_short_and_sorted() -> None:
    assert pilotflame.__all__ == sorted(["Context", "PilotflameError", "__version__", "batch"])
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


def test_every_file_imports_alone() -> None:
    """In a child each, of one interpreter that has loaded what is not ours."""
    others = sorted({other for name in modules() for other in closure(name)[1]})
    names = sorted(f"pilotflame.{name}" for name in modules())
    failed = python(f"""
        import importlib, json, os, sys, traceback
        for other in {others!r}:
            importlib.import_module(other)
        failed, running, names = [], {{}}, {names!r}
        while names or running:
            if names and len(running) < (os.cpu_count() or 1):
                name = names.pop()
                pid = os.fork()
                if pid == 0:
                    code = 0
                    try:
                        importlib.import_module(name)
                    except BaseException:
                        traceback.print_exc()
                        code = 1
                    sys.stderr.flush()
                    os._exit(code)
                running[pid] = name
                continue
            pid, status = os.wait()
            name = running.pop(pid)
            if status:
                failed.append(name)
        print(json.dumps(failed))
    """)
    assert failed == []


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


def test_the_packages_listed_are_the_folders() -> None:
    folders = {
        path.parent.name
        for path in ROOT.glob("*/__init__.py")
        if path.parent.name not in ("build", "tests") and not path.parent.name.startswith(".")
    }
    assert folders == set(PACKAGES)
    inner = {
        f"{path.parts[-3]}.{path.parts[-2]}"
        for folder in folders
        for path in (ROOT / folder).glob("*/__init__.py")
    }
    assert inner == set(ROOMS)
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(["pilotflame", *(f"pilotflame.{name}" for name in folders | inner)])
    nested = {path.parent for folder in folders - {"templates"} for path in (ROOT / folder).glob("*/**/*.py")}
    assert {path for path in nested if path.name != "__pycache__"} == {
        ROOT.joinpath(*room.split(".")) for room in ROOMS
    }


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
# Where an exception ends although it is none of Exception's: (file, function), and why.
SWALLOWED = {
    ("runtime.events.calls", "_run"),  # handed to who waits, in another thread
    ("runtime.thread_runner", "_execute"),
    ("runtime.thread_runner", "_execute_batch"),
    ("snapshot.fetching.fetch", "_work"),
}  # the end of a thread of the user's; there is nobody above it


def functions(name: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree(dict(SOURCES)[name])):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                yield node.name, inner


def called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


@pytest.mark.parametrize("name", [name for name, _ in SOURCES])
def test_nobody_sleeps_pickles_or_asserts(name: str) -> None:
    for node in ast.walk(tree(dict(SOURCES)[name])):
        assert called(node) not in ("time.sleep", "sleep"), f"{name}, line {node.lineno}: wait for an event"  # type: ignore[attr-defined]
        assert not isinstance(node, ast.Assert), f"{name}, line {node.lineno}: raise an error of the tree"
        if isinstance(node, ast.Import):
            banned = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            banned = {(node.module or "").partition(".")[0]} if not node.level else set()
        else:
            banned = set()
        assert not banned & {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}, name


@pytest.mark.parametrize("name", [name for name, _ in SOURCES])
def test_errors_are_of_the_tree_and_none_is_swallowed(name: str) -> None:
    for node in ast.walk(tree(dict(SOURCES)[name])):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = ast.unparse(node.exc).partition("(")[0]
            assert raised not in ("Exception", "BaseException"), f"{name}, line {node.lineno}"
    for function, node in functions(name):
        if isinstance(node, ast.ExceptHandler) and (
            node.type is None or "BaseException" in ast.unparse(node.type)
        ):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert raises or (name, function) in SWALLOWED, f"{name}, line {node.lineno}"


@pytest.mark.parametrize("name", [name for name, _ in SOURCES if name not in SPEAKING])
def test_nobody_prints_but_the_command_line(name: str) -> None:
    for node in ast.walk(tree(dict(SOURCES)[name])):
        assert called(node) != "print", f"{name}, line {node.lineno}"  # type: ignore[attr-defined]


def test_weights_are_never_unpickled_anywhere() -> None:
    folders = ("handlers", "runtime", "snapshot", "templates", "infra", "tests")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(tree(path)):
            if called(node) in ("torch.load", "pickle.load", "pickle.loads"):
                assert isinstance(node, ast.Call)
                safe = [ast.unparse(given.value) for given in node.keywords if given.arg == "weights_only"]
                assert safe == ["True"], f"{path}, line {node.lineno}"


def test_every_file_says_what_it_is() -> None:
    for name, path in [*SOURCES, *((path.name, path) for path in (ROOT / "tests").rglob("test_*.py"))]:
        docstring = ast.get_docstring(tree(path))
        assert docstring, name
        assert docstring.splitlines()[0].rstrip().endswith((".", "`", ":")), name


def test_tests_mirror_the_sources() -> None:
    for package in ("handlers", "runtime", "snapshot"):
        for path in (ROOT / "tests" / package).rglob("test_*.py"):
            about = path.stem.removeprefix("test_")
            folders = path.parent.relative_to(ROOT / "tests").parts
            assert ".".join((*folders, about)) in modules() or about in TOGETHER, f"{path} tests no file"


# Tests of several files at once, by what they show.
TOGETHER = {
    "corruptions",
    "faults",
    "format",
    "hostile",
    "hostile_http",
    "large",
    "schema",
    "templates",
    "weights_s3",
}


def test_this_table_would_notice() -> None:
    """The checks above, on sources that break them: a check that cannot fail holds nothing."""
    broken = ast.parse("from ..runtime.api import gateway\nimport pilotflame.errors\nfrom .. import batch\n")
    assert list(imports("handlers.contract", broken)) == [
        ("runtime.api.gateway", True),
        ("pilotflame.errors", False),
        ("", True),
    ]
    assert called(ast.parse("time.sleep(1)").body[0].value) == "time.sleep"  # type: ignore[attr-defined]
