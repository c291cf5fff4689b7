"""Recognising handlers in folders of many shapes, without running any file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.errors import HandlerSignatureError
from pilotflame.handlers.dialect import Entry, parse_reference
from pilotflame.handlers.recognise import installed_dialects

EXAMPLES = Path(__file__).parents[1] / "examples"
# If any of these files were run, the test would end here.
BOOM = "raise SystemExit('a user file was run')\n"
RUNPOD = "import runpod\ndef handler(job): return 1\nrunpod.serverless.start({'handler': handler})\n"
COG = "from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def predict(self, a: int) -> int: return a\n"
LAMBDA = "def lambda_handler(event, context): return 1\n"
OWN = "def handler(event): return 1\n"

recognise = installed_dialects().recognise


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ("" if "." in name else ".py"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BOOM + text if path.suffix == ".py" else text)
    return folder


@pytest.mark.parametrize(
    ("reference", "entry"),
    [
        ("handler.py", Entry("", "handler.py", "")),
        ("app/main.py:run", Entry("", "app/main.py", "run")),
        ("runpod:handler.py", Entry("runpod", "handler.py", "")),
        ("cog:predict.py:Predictor", Entry("cog", "predict.py", "Predictor")),
        ("lambda:app.py:lambda_handler", Entry("lambda", "app.py", "lambda_handler")),
        ("pilotflame:handler.py", Entry("pilotflame", "handler.py", "")),
        ("other:handler.py", Entry("other", "handler.py", "")),
    ],
)
def test_a_reference_is_read(reference: str, entry: Entry) -> None:
    assert parse_reference(reference) == entry


@pytest.mark.parametrize(
    "text",
    [
        RUNPOD,
        "import runpod as rp\nrp.serverless.start({'handler': lambda job: 1})",
        "import runpod.serverless\nrunpod.serverless.start({})",
        "import runpod.serverless as s\ns.start({})",
        "from runpod import serverless\nserverless.start({})",
        "from runpod.serverless import start\nstart({})",
        "from runpod.serverless import start as go\nif __name__ == '__main__':\n    go({})",
        "import runpod\nif __name__ == '__main__':\n    runpod.serverless.start({})",
        "import runpod\ndef main():\n    runpod.serverless.start({})\nmain()",
        "try:\n    import runpod\nexcept ImportError:\n    runpod = None\nrunpod.serverless.start({})",
        "from app import handler\nimport runpod\nrunpod.serverless.start(dict(handler=handler))",
    ],
)
def test_a_file_that_starts_runpods_worker_is_runpods(tmp_path: Path, text: str) -> None:
    assert recognise(write(tmp_path, handler=text)) == ("runpod", "handler.py", "")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (COG, "Predictor"),
        (COG.replace("Predictor(", "Mine("), "Mine"),
        ("import cog\nclass P(cog.BasePredictor):\n    def predict(self): return 1", "P"),
        ("from cog import BaseRunner as B\nclass Runner(B):\n    def run(self): return 1", "Runner"),
        ("from cog import Input\nclass Predictor:\n    def predict(self, a=Input()): return 1", "Predictor"),
        (COG + "class Runner(BasePredictor):\n    def run(self): return 1", "Runner"),
    ],
)
def test_a_predictor_is_cogs(tmp_path: Path, text: str, name: str) -> None:
    assert recognise(write(tmp_path, predict=text)) == ("cog", "predict.py", name)


@pytest.mark.parametrize(
    "line", ["predict: 'sub/p.py:Mine'", 'predict: "sub/p.py:Mine"', "predict: sub/p.py:Mine # x"]
)
def test_cog_yaml_says_where_the_predictor_is(tmp_path: Path, line: str) -> None:
    folder = write(tmp_path, **{"cog.yaml": f"build:\n  gpu: true\n{line}\n", "sub__p": COG, "predict": COG})
    assert recognise(folder) == ("cog", "sub/p.py", "Mine")


def test_cog_yaml_that_names_nothing_is_passed_over(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    write(tmp_path, outside=COG)
    for line in ("gone.py:P", "../outside.py:Predictor", f"{tmp_path}/outside.py:Predictor", "[1]"):
        folder = write(inner, **{"cog.yaml": f"predict: {line}\n", "predict": COG})
        assert recognise(folder) == ("cog", "predict.py", "Predictor")


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("lambda_function", LAMBDA, "lambda_handler"),
        ("app", LAMBDA, "lambda_handler"),
        ("handler", LAMBDA, "lambda_handler"),
        ("whatever", LAMBDA, "lambda_handler"),
        ("app", "def handler(event, context): return 1", "handler"),
        ("index", "async def handler(event, context): return 1", "handler"),
        ("lambda_function", LAMBDA + "def handler(thing): return 1", "lambda_handler"),
        ("app", "from powertools import lambda_handler", "lambda_handler"),
        ("src__app", LAMBDA, "lambda_handler"),
    ],
)
def test_a_lambda_function_is_lambdas(tmp_path: Path, file: str, text: str, name: str) -> None:
    assert recognise(write(tmp_path, **{file: text})) == ("lambda", file.replace("__", "/") + ".py", name)


@pytest.mark.parametrize(
    "files",
    [
        {"handler": OWN},
        {"handler": "def handler(event, context): return 1\n"},
        {"handler": "import pilotflame\n" + RUNPOD},
        {"handler": OWN, "predict": COG, "app": LAMBDA, "rp_handler": RUNPOD},
        {"handler": OWN, "predict": COG, "cog.yaml": "predict: predict.py:Predictor\n"},
        {"handler": "from model import handler\n", "rp_handler": RUNPOD},
        {"handler": "from model import *\n", "rp_handler": RUNPOD},
        {"handler": "if True:\n    handler = print\n", "rp_handler": RUNPOD},
        {"handler": "def handler(:\n", "rp_handler": RUNPOD},
        {"handler": OWN + LAMBDA},
        {"handler": "# we left runpod\nimport runpod\ndef handler(event): return runpod.Endpoint('x')\n"},
        {"app": "def handler(event): return 1\n"},
        {"app": "import pilotflame\ndef handler(event, context): return 1\n"},
        {},
    ],
    ids=lambda files: "+".join(files) or "empty",
)
def test_pilotflames_own_comes_first_where_it_is_one(tmp_path: Path, files: dict[str, str]) -> None:
    assert recognise(write(tmp_path, **files)) == ("pilotflame", "handler.py", "handler")


def test_a_handler_file_without_a_handler_is_not_in_the_way(tmp_path: Path) -> None:
    folder = write(tmp_path, handler="def helper(x): return x\n", rp_handler=RUNPOD)
    assert recognise(folder) == ("runpod", "rp_handler.py", "")


def test_usual_files_are_taken_in_their_order_and_others_must_be_alone(tmp_path: Path) -> None:
    write(tmp_path, a=RUNPOD, b=LAMBDA)
    with pytest.raises(HandlerSignatureError, match=r"a\.py, b\.py") as caught:
        recognise(tmp_path)
    assert 'handler = "runpod:a.py"' in caught.value.remedy
    assert recognise(tmp_path, "lambda:b.py") == ("lambda", "b.py", "lambda_handler")
    assert recognise(tmp_path, "a.py") == ("runpod", "a.py", "")
    assert recognise(write(tmp_path, app=LAMBDA, rp_handler=RUNPOD)) == ("runpod", "rp_handler.py", "")


def test_runpods_template_keeps_it_in_src(tmp_path: Path) -> None:
    folder = write(tmp_path, src__handler=RUNPOD, src__utils="def f(): pass", setup="import setuptools")
    assert recognise(folder) == ("runpod", "src/handler.py", "")


@pytest.mark.parametrize(
    ("reference", "entry"),
    [
        ("pilotflame:both.py", ("pilotflame", "both.py", "handler")),
        ("both.py", ("runpod", "both.py", "")),
        ("both.py:handler", ("pilotflame", "both.py", "handler")),
        ("both.py:lambda_handler", ("lambda", "both.py", "lambda_handler")),
        ("both.py:Predictor", ("cog", "both.py", "Predictor")),
        ("both.py:other", ("pilotflame", "both.py", "other")),
        ("cog:both.py", ("cog", "both.py", "Predictor")),
        ("lambda:both.py:anything", ("lambda", "both.py", "anything")),
        ("lambda:gone.py", ("lambda", "gone.py", "lambda_handler")),
        ("gone.py", ("pilotflame", "gone.py", "handler")),
    ],
)
def test_who_says_it_is_believed(tmp_path: Path, reference: str, entry: tuple[str, str, str]) -> None:
    assert recognise(write(tmp_path, both=RUNPOD + COG + LAMBDA, handler=OWN), reference) == entry


def test_what_cannot_be_read_is_left_to_its_import(tmp_path: Path) -> None:
    for content in (
        b"\0",
        b"\xff\xfe handler",
        b"x = " + b"(" * 5000,
        b"x = " + b"-" * 100_000 + b"1",
        b"a" + b".a" * 100_000,
        b"#" * (2 << 20),
    ):
        (tmp_path / "handler.py").write_bytes(content)
        assert recognise(tmp_path) == ("pilotflame", "handler.py", "handler")
    assert recognise(tmp_path / "gone") == ("pilotflame", "handler.py", "handler")


@pytest.mark.parametrize(
    ("example", "label", "dialect"),
    [
        ("runpod-plain", "handler.py", "runpod"),
        ("runpod-generator", "rp_handler.py", "runpod"),
        ("runpod-async", "handler.py", "runpod"),
        ("runpod-error", "handler.py", "runpod"),
        ("runpod-progress", "handler.py", "runpod"),
        ("cog-inputs", "predict.py:Predictor", "cog"),
        ("cog-iterator", "predict.py:Predictor", "cog"),
        ("lambda", "lambda_function.py:lambda_handler", "lambda"),
    ],
)
def test_the_examples(example: str, label: str, dialect: str) -> None:
    entry = recognise(EXAMPLES / example)
    assert (entry.label, entry.dialect) == (label, dialect)
