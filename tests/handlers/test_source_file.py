"""The facts of Python files, which a child reads from long files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from pilotflame.handlers.source_file import MAX_OWN_BYTES, MAX_SOURCE_BYTES, SourceFile
from pilotflame.runtime.node.functions.deploy import heavy_imports

SOURCE = """
import runpod as rp
from cog import BasePredictor, Path as CogPath
from . import near
if True:
    import torch.nn
class Predictor(BasePredictor, metaclass=make()):
    def predict(self, text): ...
    async def other(self): ...
def handler(event, context): return near(event)
def many(*events): ...
app: object = rp.serverless.start({"handler": handler})
"""
PADDING = "# padding\n" * MAX_OWN_BYTES


def read(folder: Path, text: str) -> SourceFile | None:
    (folder / "handler.py").write_text(text)
    return SourceFile.read(folder / "handler.py")


def test_a_long_file_shows_the_same_as_a_short_one(tmp_path: Path) -> None:
    short, long = read(tmp_path, SOURCE), read(tmp_path, SOURCE + PADDING)
    assert short is not None
    assert long == short
    assert short.classes == (("Predictor", ("cog.BasePredictor",), ("predict", "other")),)
    assert short.packages == ("runpod", "cog", "torch")
    assert short.calls == {"make", "near", "runpod.serverless.start"}
    assert short.arity["handler"] == 2
    assert short.arity["many"] is None


@pytest.mark.parametrize(
    "text", ["def handler(:\n", "x = " + "(" * 5000, "\0"], ids=["syntax", "nested", "nul"]
)
@pytest.mark.parametrize("padding", ["", PADDING], ids=["short", "long"])
def test_a_file_that_cannot_be_parsed_shows_nothing(tmp_path: Path, text: str, padding: str) -> None:
    assert read(tmp_path, text + padding) is None


@pytest.mark.parametrize("line", ["x=1\n", "[" * 90 + "]" * 90 + "\n"], ids=["statements", "nested"])
def test_a_long_file_takes_no_memory_of_this_process(tmp_path: Path, line: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A third of the limit, because a longer file takes the child several seconds.
    read(tmp_path, line * (MAX_SOURCE_BYTES // 3 // len(line)))
    # In KiB. The parser would take 200 MB for either file.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_long_names_make_no_long_facts(tmp_path: Path) -> None:
    """Facts repeat the full name of a package for each call. A long name and 5,000 calls would make long facts."""
    many = "".join(f"x.Q{number}()\n" for number in range(5_000))
    assert read(tmp_path, f"import {'a' * 2500} as x\n{many}") is not None
    assert read(tmp_path, f"import {'a' * 150} as x\n{many}") is None


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("import torch\n" + "x=1\n" * 1_500_000)
    assert heavy_imports(tmp_path / "handler.py") == ()
    assert SourceFile.read(tmp_path / "handler.py") is None
