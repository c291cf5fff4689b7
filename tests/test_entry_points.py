"""The plugins of a gateway: without plugins, with each plugin alone, and with a plugin of another package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from doc_blocks import blocks
from live import Gateway, failure, gateway_here, gateway_process
from pilotflame import entry_points
from pilotflame.entry_points import APIS, DIALECTS, OBSERVERS, check_names, load_one, offers
from pilotflame.errors import PluginError

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"
PLUGINS = (
    "anthropic", "asgi", "aws_lambda", "azure", "cloudevents", "cog", "kserve", "oip", "openai", "replicate", "request_log", "runpod", "sagemaker",
    "tensorflow_serving", "tgi", "torchserve", "vertex",
)  # fmt: skip
# A route of each plugin that calls a function by its name. The function does not exist.
ROUTES = {
    "anthropic": "/anthropic/v1/messages", "azure": "/openai/deployments/gone/completions",
    "aws_lambda": "/lambda/2015-03-31/functions/gone/invocations", "cog": "/cog/predictions", "kserve": "/kserve/v1/models/gone:predict",
    "oip": "/oip/v2/models/gone/infer", "openai": "/openai/v1/completions", "replicate": "/replicate/v1/predictions",
    "runpod": "/v2/gone/runsync", "tgi": "/tgi/gone/generate",
    "vertex": "/vertex/v1/projects/p/locations/l/endpoints/gone:predict", "torchserve": "/torchserve/predictions/gone",
    "sagemaker": "/sagemaker/endpoints/gone/invocations", "tensorflow_serving": "/tensorflow-serving/v1/models/gone:predict",
}  # fmt: skip
RUNPOD = "import runpod\nrunpod.serverless.start({'handler': lambda job: job['input']})\n"


async def answers(gateway: Gateway) -> dict[str, bool]:
    """Return whether the gateway has the route of each plugin."""
    found = {name: await gateway.client.post(path, json={}) for name, path in ROUTES.items()}
    return {name: "There is nothing at" not in reply.text for name, reply in found.items()}


def test_the_plugins_of_this_package_are_found() -> None:
    assert set(offers(APIS)) == set(PLUGINS)
    assert set(offers(OBSERVERS)) == {"opentelemetry"}
    assert set(offers(DIALECTS)) == {"asgi", "aws_lambda", "cog", "runpod", "torchserve", "wsgi"}
    check_names((*PLUGINS, "opentelemetry"))
    with pytest.raises(PluginError, match="`plugins` has nothing, which no installed package offers"):
        check_names(["cog", "nothing"])


def test_a_name_that_two_packages_offer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [EntryPoint("cog", f"{module}:X", "pilotflame.apis") for module in ("one", "two")]
    monkeypatch.setattr(entry_points, "entry_points", lambda group: two)
    offers.cache_clear()
    try:
        with pytest.raises(
            PluginError, match=r"Two packages offer 'cog' in pilotflame.apis: one:X and two:X"
        ):
            offers(APIS)
    finally:
        offers.cache_clear()


def test_a_plugin_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(PluginError, match="'gone' cannot be loaded from no_such_module:X"):
        load_one(EntryPoint("gone", "no_such_module:X", "pilotflame.apis"))


@pytest.mark.parametrize("on", [(), *((name,) for name in PLUGINS), PLUGINS], ids=" ".join)
async def test_a_gateway_has_the_plugins_that_are_on(state: Path, on: tuple[str, ...]) -> None:
    async with gateway_here(state, plugins=on) as gateway:
        assert await answers(gateway) == {name: name in on for name in ROUTES}
        function = await gateway.deploy("def handler(event):\n    return event")
        assert await function.answer(7) == 7


async def test_plugins_answer_without_their_base_if_a_setting_says_so(state: Path) -> None:
    async with gateway_here(state, bare_paths=True) as gateway:
        for path in ("/predictions", "/cog/predictions", "/v1/predictions", "/replicate/v1/predictions"):
            assert "unknown_route" not in (await gateway.client.post(path, json={})).text
        assert (await gateway.client.get("/")).json()["predictions_url"] == "/predictions"
    async with gateway_here(state) as gateway:
        assert "unknown_route" in (await gateway.client.post("/predictions", json={})).text
        assert (await gateway.client.get("/")).json()["predictions_url"] == "/cog/predictions"


async def test_an_unknown_plugin_stops_the_start(state: Path) -> None:
    with pytest.raises(PluginError, match="`plugins` has kog"):
        async with gateway_here(state, plugins=("kog",)):
            pass


async def test_a_function_outlives_the_plugin_of_its_dialect(state: Path) -> None:
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(RUNPOD, name="jobs")
        assert (await function.call({"input": 3})).json() == 3
    async with gateway_here(state, plugins=("cog",)) as gateway:
        error = failure(await gateway.client.post("/invoke/jobs", json={"input": 3}))
        assert "The handler is runpod's, and no such dialect is installed." in error["message"]
    async with gateway_here(state) as gateway:
        assert (await gateway.client.post("/invoke/jobs", json={"input": 3})).json() == 3


# -- a plugin of another package


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return a Python with this environment's packages and the package of docs/plugins.md."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    packages = tmp_path / "env" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    info = packages / "instances-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: instances\nVersion: 1.0\n")
    source, project = (block.text for block in list(blocks(PAGE.read_text()))[:2])
    (packages / "instances.py").write_text(source)
    group, offer = project.strip().splitlines()[-2:]
    assert group == '[project.entry-points."pilotflame.apis"]'
    (info / "entry_points.txt").write_text(f"[pilotflame.apis]\n{offer.replace(chr(34), '')}\n")
    return str(tmp_path / "env" / "bin" / "python")


async def test_a_plugin_of_another_package(state: Path, python: str) -> None:
    async with gateway_process(state, python=python) as gateway:
        function = await gateway.deploy("def handler(event):\n    return 100 // event")
        path = f"/instances/{function.name}/predict"
        reply = await gateway.client.post(path, json={"instances": [2, 5]})
        assert (reply.status_code, reply.json()) == (200, {"predictions": [50, 20]})
        # The dialect answers with the function's errors and with the errors of its own checks.
        assert (
            failure(await gateway.client.post(path, json={"instances": [2, 0]}))["type"] == "handler_failed"
        )
        assert failure(await gateway.client.post(path, json={"rows": []}))["type"] == "bad_json"
        described = (await gateway.client.get("/openapi.json")).json()
        assert described["paths"]["/instances/{function}/predict"]["post"]["summary"]
        assert all((await answers(gateway)).values())


def test_the_dialect_of_another_package_passes_its_tests(tmp_path: Path) -> None:
    *_, dialect, tests = (block.text for block in blocks(PAGE.read_text()) if block.language == "python")
    (tmp_path / "tones.py").write_text(dialect)
    (tmp_path / "test_tones.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, "-c", os.devnull]

    def run(*options: str) -> str:
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
        )
        return done.stdout.splitlines()[-1] if done.stdout else done.stderr

    assert re.match(r"1\d passed in ", run())
    # The package now has a fault that only the tests of `DialectTests` find.
    (tmp_path / "tones.py").write_text(dialect.replace('"tone" in source.arity', "file"))
    assert re.match(r"1 failed, \d+ deselected in ", run("-k", "left_alone"))
