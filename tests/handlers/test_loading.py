"""Files below the root of the code: what they import, as in their own containers, and what their child processes import."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

Deploy = Callable[..., Awaitable[Any]]
pytestmark = pytest.mark.asyncio(loop_scope="module")
SHARED = {"shared.py": "X = 'shared'\n"}
RUNPOD = "import runpod\nrunpod.serverless.start({'handler': lambda job: [F, X]})\n"
COG = "from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def predict(self) -> list:\n        return [F, X]\n"
HANDLERS = {
    "plain": ("app.py", "def handler(event):\n    return [F, X]\n"),
    "runpod": ("runpod:app.py", RUNPOD),
    "cog": ("cog:app.py:Predictor", COG),
    "lambda": ("lambda:app.py:call", "def call(event, context):\n    return [F, X]\n"),
}
IMPORTS = {
    "of-the-root": "from src.util import F\nfrom shared import X\n",
    "of-the-folder": "from util import F\nfrom shared import X\n",
    "relative": "from .util import F\nfrom shared import X\n",
    "deep": "from src.deep.more import F\nfrom shared import X\n",
    "of-itself": "import sys\nF = 'util'\nfrom shared import X\nassert sys.modules.get('app', sys.modules['__main__']).F == F\n",
}


def placed(reference: str, folder: str) -> str:
    """Return a reference whose file is in a folder."""
    return reference.replace("app.py", f"{folder}/app.py")


# RunPod's package takes 2.6 s to import, so only one of its cases runs. Its handlers are scripts, which have
# no package.
CASES = [(kind, one) for kind in HANDLERS for one in IMPORTS if kind != "runpod" or one == "of-the-root"]


@pytest.mark.parametrize(("kind", "imports"), CASES)
async def test_a_file_in_a_folder_imports_as_at_home(deploy: Deploy, kind: str, imports: str) -> None:
    reference, source = HANDLERS[kind]
    files = {
        "src/app.py": IMPORTS[imports] + source, "src/util.py": "F = 'util'\n",
        "src/deep/more.py": "from ..util import F\n", **SHARED,
    }  # fmt: skip
    function = await deploy(None, {"handler": placed(reference, "src")}, files=files)
    answer = await function.answer({"input": {}} if kind == "runpod" else {})
    assert (answer.get("output") if isinstance(answer, dict) else answer) == ["util", "shared"]


@pytest.mark.parametrize(
    ("folder", "init"),
    [
        ("src", "from .app import handler\n"), ("src", "LOADED = True\n"), ("my-code", None), ("test", None),
        ("json", None), ("a/b/c", None), ("numpy", None),
    ],
)  # fmt: skip
async def test_any_folder_may_have_the_file(deploy: Deploy, folder: str, init: str | None) -> None:
    source = "import util\nMADE = globals().get('MADE', 0) + 1\ndef handler(event):\n    return [util.F, MADE, __name__]\n"
    files = {f"{folder}/app.py": source, f"{folder}/util.py": "F = 'util'\n"}
    if init is not None:
        files[f"{folder}/__init__.py"] = init
    function = await deploy(None, {"handler": f"{folder}/app.py"}, files=files)
    assert (await function.answer({}))[:2] == ["util", 1]


POOL = """
import multiprocessing
def double(n):
    return SDK and n * 2
def work(job):
    with multiprocessing.get_context(job["input"]["method"]).Pool(1) as pool:
        return pool.map(double, [1, 2])
"""
POOLS = {
    "runpod": "import runpod\nfrom runpod.serverless.utils import rp_upload\nSDK = runpod.__name__\n"
    + POOL + "if __name__ == '__main__':\n    runpod.serverless.start({'handler': work})\n",
    "cog": "from cog import BasePredictor, Input, Path\nSDK = Path.__name__\n"
    + POOL + "class Predictor(BasePredictor):\n    def predict(self, method: str) -> list:\n"
    "        return work({'input': {'method': method}})\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "method"), [("runpod", "spawn"), ("cog", "fork"), ("cog", "spawn"), ("cog", "forkserver")]
)
async def test_processes_of_a_pool_find_the_package_and_the_file(
    deploy: Deploy, kind: str, method: str
) -> None:
    reference = "cog:main.py:Predictor" if kind == "cog" else "runpod:main.py"
    function = await deploy(None, {"handler": reference}, files={"main.py": POOLS[kind]})
    assert await function.answer({"input": {"method": method}}) == [2, 4]
