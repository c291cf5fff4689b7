"""Fork safety, tested by forking, each time in a fresh interpreter."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.worker import fork_safety


def program(text: str, *arguments: str, cwd: Path | None = None) -> Any:
    """Run `text` in a fresh interpreter and return what it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *arguments],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_thread_that_ends_does_not_count_and_one_that_stays_does() -> None:
    counts = program("""
        import json, threading
        from pilotflame.runtime.worker import fork_safety
        fork_safety.ENDING_S = 100.0
        stay = threading.Event()
        threading.Timer(0.05, int).start()
        ending = fork_safety.lasting_thread_count()
        fork_safety.ENDING_S = 0.05
        threading.Thread(target=stay.wait).start()
        staying = fork_safety.lasting_thread_count()
        stay.set()
        print(json.dumps([ending, staying]))
    """)
    assert counts == [1, 2]


def test_children_draw_different_numbers() -> None:
    drawn = program("""
        import json, os, random
        import numpy, torch
        from pilotflame.runtime.worker import fork_safety
        torch.set_num_threads(1)
        random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
        found = []
        for reseeds in (False, False, True, True):
            read, write = os.pipe()
            if os.fork() == 0:
                if reseeds:
                    fork_safety.reseed()
                drawn = [random.random(), float(numpy.random.random()), float(torch.rand(()))]
                os.write(write, json.dumps(drawn).encode())
                os._exit(0)
            os.close(write)
            found.append(json.loads(os.read(read, 4096)))
            os.wait()
        print(json.dumps(found))
    """)
    plain, again, one, other = drawn
    assert plain[1:] == again[1:]  # a fork alone inherits the states
    for first, second, bare in zip(one, other, plain, strict=True):
        assert len({first, second, bare}) == 3


def test_a_detached_child_ends_with_its_parent_and_has_a_new_session() -> None:
    """parent (killed) -> child (detached, waits); the child's end is seen as the end of its pipe."""
    text = """
        import os, signal, sys
        from pilotflame.runtime.worker import fork_safety
        signal.signal(signal.SIGTERM, lambda *_: None)   # a parent's handlers are not the child's
        parent = os.getpid()
        if os.fork() == 0:
            fork_safety.detach(parent)
            print(os.getpid(), os.getsid(0), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
                  signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)
            signal.pause()
        signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, session, default, ignored = parent.stdout.readline().split()
        assert (session, default, ignored) == (pid, "True", "True")
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""  # ends once the child has ended too
        parent.wait()


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        fork_safety.detach(1 if os.getppid() != 1 else 2)  # not the parent
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_threads_are_counted_as_the_kernel_does() -> None:
    counts = program("""
        import json, threading
        from pilotflame.runtime.worker import fork_safety
        before, gate = fork_safety.thread_count(), threading.Event()
        thread = threading.Thread(target=gate.wait)
        thread.start()
        during = fork_safety.thread_count()
        named = fork_safety.describe_threads({})
        gate.set()
        thread.join()
        print(json.dumps([before, during, named]))
    """)
    assert counts[:2] == [1, 2]
    assert "Thread-1" in counts[2]


def test_torch_gets_its_threads_back() -> None:
    assert program("""
        import json, torch
        from pilotflame.runtime.worker import fork_safety
        torch.set_num_threads(1)
        found = [fork_safety.torch_threads()]
        fork_safety.set_threads(3)
        print(json.dumps([*found, fork_safety.torch_threads()]))
    """) == [1, 3]


def test_without_torch_there_is_one_thread_and_none_is_loaded() -> None:
    assert program("""
        import json, sys
        from pilotflame.runtime.worker import fork_safety
        fork_safety.set_threads(4); fork_safety.reseed(); fork_safety.freeze_objects()
        print(json.dumps([fork_safety.torch_threads(), "torch" in sys.modules, "numpy" in sys.modules]))
    """) == [1, False, False]


STARTS = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.parametrize(
    ("files", "started"),
    [
        ({"quiet.py": "X = 1"}, {}),
        ({"loud.py": STARTS}, {"loud": 1}),
        ({"loud.py": STARTS * 3}, {"loud": 3}),
        ({"outer.py": "import inner", "inner.py": STARTS}, {"inner": 1}),
        ({"outer.py": f"import inner\n{STARTS}", "inner.py": STARTS * 2}, {"inner": 2, "outer": 1}),
        ({"outer.py": f"{STARTS}import inner", "inner.py": "X = 1"}, {"outer": 1}),
        ({"pack/__init__.py": "from . import deep", "pack/deep.py": STARTS}, {"pack.deep": 1}),
        ({"outer.py": "import first, second", "first.py": STARTS, "second.py": STARTS}, {"first": 1, "second": 1}),
    ],
)  # fmt: skip
def test_threads_are_attributed_to_the_innermost_import(
    tmp_path: Path, files: dict[str, str], started: dict[str, int]
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    first = next(iter(files)).partition("/")[0].removesuffix(".py")
    found, described, watching = program(
        f"""
        import json, sys
        sys.path.insert(0, "")
        from pilotflame.runtime.worker import fork_safety
        before = list(sys.meta_path)
        with fork_safety.watch_threads() as started:
            import {first}
        print(json.dumps([started, fork_safety.describe_threads(started), sys.meta_path != before]))
        """,
        cwd=tmp_path,
    )
    assert found == started
    assert not watching
    assert all(f"importing {name}" in described for name in started)


def test_watched_imports_behave_like_plain_ones(tmp_path: Path) -> None:
    """Resources, reloads, namespace packages, built-in and missing modules: the same as without the watch."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "data.txt").write_text("inside")
    (tmp_path / "space" / "sub").mkdir(parents=True)
    (tmp_path / "space" / "sub" / "mod.py").write_text("X = 1")
    text = """
        import json, sys, importlib, importlib.resources, inspect, pkgutil, contextlib
        sys.path.insert(0, "")
        from pilotflame.runtime.worker import fork_safety
        with fork_safety.watch_threads() if sys.argv[1] == "watched" else contextlib.nullcontext():
            import pack, space.sub.mod, _json, xml.dom.minidom
            inside = importlib.resources.files("pack").joinpath("data.txt").read_text()
            missing = importlib.util.find_spec("no_such_module") is None
            try:
                import pack.no_such_module
            except ModuleNotFoundError as error:
                name = error.name
            importlib.reload(pack)
        print(json.dumps([
            inside, missing, name, type(pack.__loader__).__name__, type(pack.__spec__.loader).__name__,
            pkgutil.get_data("pack", "data.txt").decode(), inspect.getsource(space.sub.mod), space.sub.mod.X,
        ]))
    """
    watched, plain = (program(text, how, cwd=tmp_path) for how in ("watched", "plain"))
    assert watched == plain
    assert watched[0] == "inside"


def test_an_import_that_fails_under_watch_raises(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1/0")
    assert program(
        """
        import json, sys
        sys.path.insert(0, "")
        from pilotflame.runtime.worker import fork_safety
        with fork_safety.watch_threads() as started:
            try:
                import broken
            except ZeroDivisionError:
                print(json.dumps(["broken" in sys.modules, started]))
        """,
        cwd=tmp_path,
    ) == [False, {}]


def test_unknown_threads_are_attributed_to_a_native_library() -> None:
    assert fork_safety.describe_threads({"b": 1, "a": 2}) == "importing b, importing a"
    assert (
        program("""
        import json
        from pilotflame.runtime.worker import fork_safety
        print(json.dumps(fork_safety.describe_threads({})))
    """)
        == "a native library"
    )


def test_a_progress_bar_at_import_starts_no_thread(tmp_path: Path) -> None:
    (tmp_path / "bars.py").write_text(
        "from tqdm.auto import tqdm\nfor _ in tqdm(range(2), disable=False):\n    pass\n"
    )
    text = """
        import json, sys
        sys.path.insert(0, "")
        from pilotflame.runtime.worker import fork_safety
        if sys.argv[1] == "preloaded":
            import tqdm.auto
        with fork_safety.watch_threads() as started:
            import bars
        print(json.dumps([started, fork_safety.thread_count()]))
    """
    for how in ("preloaded", "not preloaded"):
        assert program(text, how, cwd=tmp_path) == [{}, 1]


def test_the_remedy_names_the_line() -> None:
    assert "put `import b` and `import a` into setup(context)" in fork_safety.describe_remedy(
        {"b.c": 1, "a": 2}
    )
    assert "start threads in setup(context)" in fork_safety.describe_remedy({})
