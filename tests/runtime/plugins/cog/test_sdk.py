"""Cog's predictors with the `cog` package of PyPI in their folder, and with our stand-in for it."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live import Function, Gateway
from pilotflame.handlers.contract import Context

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAND_IN = "stand-in"
# Releases whose `Input(...)` is a field of pydantic.
VERSIONS = ("0.14.12", "0.15.11", "0.16.12")
HELLO = "data:text/plain;base64," + base64.b64encode(b"hello").decode()
PREDICTOR = """
from typing import List, Literal, Optional
import io
import cog
from cog import BaseModel, BasePredictor, File, Input, Path, Secret, current_scope
from cog.types import ConcatenateIterator

class Output(BaseModel):
    text: str
    file: File
    path: Path

class Predictor(BasePredictor):
    def setup(self, weights: Optional[File] = None):
        self.weights = weights.read().decode() if weights else "none"

    def predict(
        self,
        number: int = Input(description="How many", ge=2, le=5, default=3),
        ratio: float = Input(ge=0.5, default=1.0),
        style: str = Input(choices=["plain", "bold"], default="plain"),
        size: int = Input(choices=[1, 2], default=1),
        word: str = Input(min_length=2, max_length=4, regex="^a", default="ab"),
        needed: str = Input(description="must be sent"),
        kind: Literal["x", "y"] = "x",
        seed: int = Input(default=None),
        token: Secret = Input(default=None),
        picture: Optional[Path] = Input(default=None),
    ) -> Output:
        said = [number, ratio, style, size, word, needed, kind, seed, token and token.get_secret_value(), self.weights]
        said += [picture and picture.read_text(), dict(current_scope().context), bool(cog.__version__)]
        written = Path("out.txt")
        written.write_text("written")
        return Output(text=repr(said), file=io.StringIO("opened"), path=written)
"""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`package(version)` returns a folder with that release of `cog`. Without a package index, the test is skipped."""
    root = tmp_path_factory.mktemp("cog")

    def installed(version: str) -> Path:
        target = root / version
        if not target.exists():
            # Omit the dependencies: `cog` pins old versions of them, and the tests' environment has all that `cog` imports.
            install = [
                sys.executable,
                "-m",
                "uv",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                target,
                f"cog=={version}",
            ]
            if subprocess.run(install, capture_output=True, timeout=120, check=False).returncode:
                pytest.skip(f"cog {version} cannot be downloaded")
        return target

    return installed


async def deployed(
    gateway: Gateway, package: Callable[[str], Path], version: str, folder: Path, source: str = PREDICTOR
) -> Function:
    (folder / "predict.py").write_text(source)
    if version != STAND_IN:
        found = await asyncio.to_thread(package, version)
        shutil.copytree(found / "cog", folder / "cog")
    env = {"env.COG_WEIGHTS": "data:text/plain;base64,d2VpZ2h0cw=="}
    name = f"cog-{version.replace('.', '-')}"
    response = await gateway.client.post(
        "/v1/functions", json={"path": str(folder), "overrides": {"name": name, **env}}
    )
    assert response.status_code == 201, response.text
    return gateway.function(name, response.json())


@pytest.mark.parametrize("version", [STAND_IN, *VERSIONS])
async def test_inputs_and_outputs(
    gateway: Gateway, package: Callable[[str], Path], version: str, tmp_path: Path
) -> None:
    function = await deployed(gateway, package, version, tmp_path)
    schema = function.described["input_schema"]
    assert schema["required"] == ["needed"]
    shown = schema["properties"]
    assert (shown["number"]["minimum"], shown["number"]["maximum"], shown["number"]["default"]) == (2, 5, 3)
    assert shown["number"]["description"] == "How many"
    assert [shown[name]["x-order"] for name in shown] == list(range(10))
    assert (shown["style"]["enum"], shown["size"]["enum"]) == (["plain", "bold"], [1, 2])

    found = await function.answer({"needed": "n", "token": "s", "picture": HELLO})
    said = [3, 1.0, "plain", 1, "ab", "n", "x", None, "s", "weights", "hello", {}, True]
    assert found["text"] == repr(said)
    assert found["file"] == "data:application/octet-stream;base64," + base64.b64encode(b"opened").decode()
    assert found["path"] == "data:text/plain;base64," + base64.b64encode(b"written").decode()

    wrong = {
        "number": 6, "ratio": 0.4, "style": "loud", "size": 3, "word": "bcdef", "kind": "z", "seed": "x",
        "picture": "nothing",
    }  # fmt: skip
    error = await function.error(wrong)
    assert error["status"] == 422, error
    problems = {problem["path"] for problem in error["details"]["problems"]}
    assert {path.removeprefix("input.").partition(".")[0] for path in problems} == {*wrong, "needed"}
    assert (await function.error({"needed": "n", "number": 1}))["status"] == 422


STREAM = """
from cog import BasePredictor, ConcatenateIterator
import asyncio
class Predictor(BasePredictor):
    async def predict(self, n: int = 2) -> ConcatenateIterator[str]:
        for i in range(n):
            yield str(i)
"""


@pytest.mark.parametrize("version", [STAND_IN, VERSIONS[-1]])
async def test_streams(
    gateway: Gateway, package: Callable[[str], Path], version: str, tmp_path: Path
) -> None:
    source = STREAM.replace("async def", "def") if version != STAND_IN else STREAM.replace(
        "ConcatenateIterator", "AsyncConcatenateIterator"
    )  # fmt: skip
    function = await deployed(gateway, package, version, tmp_path, source)
    assert function.described["streaming"]
    assert function.described["output_schema"]["x-cog-array-display"] == "concatenate"
    assert 'data: "1"' in (await function.call({})).text


async def test_the_names_of_the_package_exist(made: Callable[..., Any]) -> None:
    predictor = made(
        "cog:predict.py",
        "import cog\nfrom cog.predictor import BasePredictor\nfrom cog.server.scope import current_scope\n"
        "class Predictor(BasePredictor):\n    def predict(self) -> str:\n        return cog.__version__\n",
    )
    predictor.set_up()
    assert predictor() == "0.16.12"


@pytest.mark.parametrize(
    ("annotation", "opened"),
    [("File", "weights.read().decode()"), ("Path", "weights.read_text()"), ("Optional[Path]", "weights.read_text()"), ("str", "weights")],
)  # fmt: skip
async def test_weights_are_what_the_annotation_says(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, annotation: str, opened: str
) -> None:
    monkeypatch.setenv("COG_WEIGHTS", HELLO)
    source = (
        "from typing import Optional\nfrom cog import BasePredictor, File, Path\nclass Predictor(BasePredictor):\n"
        f"    def setup(self, weights: {annotation}):\n        self.content = {opened}\n"
        "    def predict(self) -> str:\n        return self.content\n"
    )
    predictor = made("cog:predict.py", source)
    predictor.set_up()
    assert predictor() == (HELLO if annotation == "str" else "hello")
    before = set(Path(tempfile.gettempdir()).glob("pilotflame-*"))
    predictor.handler.teardown(Context("tone", "r1"))
    gone = before - set(Path(tempfile.gettempdir()).glob("pilotflame-*"))
    assert bool(gone) == (annotation != "str")


async def test_an_output_must_fit_its_annotation(made: Callable[..., Any]) -> None:
    source = (
        "from typing import Any\nimport enum\nfrom cog import BasePredictor, Path\nKinds = enum.Enum('Kinds', {'A': 'a'})\n"
        "class Predictor(BasePredictor):\n    def predict(self, n: int) -> int:\n        return [1, 'foo', Path('x')][n]\n"
    )
    predictor = made("cog:predict.py", source)
    predictor.set_up()
    assert predictor({"n": 0}) == 1
    for number in (1, 2):
        with pytest.raises(Exception, match="does not fit the predictor's return annotation"):
            predictor({"n": number})


async def test_bytes_are_text_where_text_is_annotated(made: Callable[..., Any]) -> None:
    source = "from cog import BasePredictor, File\nclass Predictor(BasePredictor):\n    def predict(self, file: File) -> str:\n        return file.read()\n"
    predictor = made("cog:predict.py", source)
    predictor.set_up()
    assert predictor({"file": HELLO}) == "hello"
