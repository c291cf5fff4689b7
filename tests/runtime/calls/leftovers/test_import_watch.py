"""The watch of imports, each time in a fresh interpreter."""

from pathlib import Path

import pytest
from interpreter import program


def test_a_thread_that_ends_does_not_count_and_one_that_stays_does() -> None:
    counts = program("""
        import json, threading
        from pilotflame.runtime.calls.leftovers import import_watch
        import_watch.ENDING_S = 100.0
        stay = threading.Event()
        threading.Timer(0.05, int).start()
        ending = import_watch.lasting_thread_count()
        import_watch.ENDING_S = 0.05
        threading.Thread(target=stay.wait).start()
        staying = import_watch.lasting_thread_count()
        stay.set()
        print(json.dumps([ending, staying]))
    """)
    assert counts == [1, 2]


def test_threads_are_counted_as_the_kernel_does() -> None:
    counts = program("""
        import json, threading
        from pilotflame.runtime.calls.leftovers import import_watch
        before, gate = import_watch.thread_count(), threading.Event()
        thread = threading.Thread(target=gate.wait)
        thread.start()
        during = import_watch.thread_count()
        gate.set()
        thread.join()
        print(json.dumps([before, during]))
    """)
    assert counts == [1, 2]


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
    found, watching = program(
        f"""
        import json, sys
        sys.path.insert(0, "")
        from pilotflame.runtime.calls.leftovers import import_watch
        before = list(sys.meta_path)
        with import_watch.watch_imports() as watch:
            import {first}
        print(json.dumps([watch.started, sys.meta_path != before]))
        """,
        cwd=tmp_path,
    )
    assert found == started
    assert not watching


def test_watched_imports_behave_like_plain_ones(tmp_path: Path) -> None:
    """Resources, reloads, namespace packages, and built-in and missing modules work as they do without the watch."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "data.txt").write_text("inside")
    (tmp_path / "space" / "sub").mkdir(parents=True)
    (tmp_path / "space" / "sub" / "mod.py").write_text("X = 1")
    text = """
        import json, sys, importlib, importlib.resources, inspect, pkgutil, contextlib
        sys.path.insert(0, "")
        from pilotflame.runtime.calls.leftovers import import_watch
        with import_watch.watch_imports() if sys.argv[1] == "watched" else contextlib.nullcontext():
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
        from pilotflame.runtime.calls.leftovers import import_watch
        with import_watch.watch_imports() as watch:
            try:
                import broken
            except ZeroDivisionError:
                print(json.dumps(["broken" in sys.modules, watch.started]))
        """,
        cwd=tmp_path,
    ) == [False, {}]


def test_a_progress_bar_at_import_starts_no_thread_and_shares_no_lock(tmp_path: Path) -> None:
    (tmp_path / "bars.py").write_text(
        "from tqdm.auto import tqdm\nfor _ in tqdm(range(2), disable=False):\n    pass\n"
    )
    text = """
        import json, sys
        sys.path.insert(0, "")
        from pilotflame.runtime.calls.leftovers import descriptors, import_watch
        if sys.argv[1] == "preloaded":
            import tqdm.auto
        with import_watch.watch_imports() as watch:
            import bars
        print(json.dumps([watch.started, import_watch.thread_count(), list(descriptors.shared_memory())]))
    """
    for how in ("preloaded", "not preloaded"):
        assert program(text, how, cwd=tmp_path) == [{}, 1, []]


@pytest.mark.parametrize(
    ("files", "opened"),
    [
        ({"outer.py": "import inner\nA = open(__file__)", "inner.py": "B = open(__file__)"}, {"outer": "outer.py", "inner": "inner.py"}),
        ({"outer.py": "A = open(__file__)\nimport inner", "inner.py": "open(__file__).close()"}, {"outer": "outer.py"}),
        ({"outer.py": "import inner\nA = open(__file__)\ninner.B.close()", "inner.py": "B = open(__file__)"}, {"outer": "outer.py"}),
        ({"outer.py": "import first, second", "first.py": "A = open(__file__)\nA.close()", "second.py": "B = open(__file__)"}, {"second": "second.py"}),
    ],
)  # fmt: skip
def test_descriptors_are_attributed_to_the_innermost_import(
    tmp_path: Path, files: dict[str, str], opened: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = program(
        """
        import json, os, sys
        sys.path.insert(0, "")
        from pilotflame.runtime.calls.leftovers import import_watch
        with import_watch.watch_imports() as watch:
            import outer
        files = {name: os.path.basename(os.readlink(f"/proc/self/fd/{number}")) for number, name in watch.opened.items()}
        print(json.dumps(files))
        """,
        cwd=tmp_path,
    )
    assert found == opened
