"""Versions of models in MLflow's registry as snapshots: their files are on the server, in a folder or in S3.

The same tests run against a double of the server and, with `-m slow`, against a real server, if MLFLOW names `mlflow`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlflow_server import API, ARTIFACTS, Models, mlflow_double
from pilotflame.addresses import Addresses
from pilotflame.errors import PilotflameError, SourceDenied, SourceError, SourceMissing
from pilotflame.snapshot.caching.download import download
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.registries.mlflow import MlflowSource, ModelVersion
from pilotflame.snapshot.sources.access import Access
from pilotflame.snapshot.sources.locate import open_source
from pilotflame.snapshot.sources.realm import realm_of
from safetensors.torch import save
from source_tests import OBJECTS, SourceTests, read

MLFLOW = os.environ.get("MLFLOW") or shutil.which("mlflow")
WEIGHTS = save({"a": torch.arange(1_500_000.0)})
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "sub/x.txt": b"x"}
HUSH = "hush-of-mlflow"


@pytest.fixture(autouse=True)
def _bare(bare_environment: None) -> None:
    """Remove the variables of this machine."""


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=pytest.mark.slow)])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    if request.param == "double":
        with mlflow_double() as (found, _):
            yield found
        return
    if MLFLOW is None:
        pytest.skip(
            "mlflow is not installed: pip install mlflow into an environment, and name its mlflow in MLFLOW"
        )
    yield from _real(tmp_path_factory.mktemp("mlflow"))


def _real(folder: Path) -> Iterator[Models]:
    command = [
        str(MLFLOW), "server", "--host", "127.0.0.1", "--port", "0", "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/db.sqlite", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = subprocess.Popen(
        command,
        env=environ,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader: threading.Thread | None = None
    try:
        lines = iter(process.stdout.readline, "")
        found = next(filter(None, (re.search(r"running on (http://[\d.:]+)", line) for line in lines)), None)
        assert found is not None, "mlflow ended"
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        reader.start()
        running = Models(found[1])
        try:
            yield running
        finally:
            running.close()
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        if reader is not None:
            reader.join()
        process.stdout.close()


@pytest.fixture
def tracking(models: Models, monkeypatch: pytest.MonkeyPatch) -> Models:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", models.url)
    return models


class TestMlflowSource(SourceTests):
    @pytest.fixture
    def source(self, tracking: Models) -> MlflowSource:
        version = tracking.add("tested", tracking.upload(OBJECTS))
        return MlflowSource(f"mlflow://tested/{version}")


def test_the_server_answers_as_the_tests_expect(tracking: Models) -> None:
    """Check the answers on which the source relies, so that the double gives the same answers as a real server."""
    location = tracking.upload({"a.txt": b"abc", "d/b.txt": b"b"})
    version, folder = tracking.add("answers", location, "prod"), location.removeprefix("mlflow-artifacts:/")
    status, answer = tracking.ask(f"{API}/registered-models/alias", name="answers", alias="prod")
    assert (status, answer["model_version"]["version"]) == (200, version)
    status, answer = tracking.ask(f"{API}/model-versions/get-download-uri", name="answers", version=version)
    assert (status, answer) == (200, {"artifact_uri": location})
    _, answer = tracking.ask(ARTIFACTS, path=folder)
    assert answer["files"] == [
        {"path": "a.txt", "is_dir": False, "file_size": 3},
        {"path": "d", "is_dir": True},
    ]
    assert tracking.ask(ARTIFACTS, path=f"{folder}/none") == (200, {})
    wrong = [
        (
            f"{API}/registered-models/alias",
            {"name": "answers", "alias": "none"},
            400,
            "INVALID_PARAMETER_VALUE",
        ),
        (
            f"{API}/model-versions/get-download-uri",
            {"name": "answers", "version": "9"},
            404,
            "RESOURCE_DOES_NOT_EXIST",
        ),
        (f"{ARTIFACTS}/{folder}/none", {}, 404, "RESOURCE_DOES_NOT_EXIST"),
    ]
    for path, query, expected, code in wrong:
        status, answer = tracking.ask(path, **query)
        assert (status, answer["error_code"]) == (expected, code)


@pytest.mark.parametrize("model", ["net", "a model of mine"])
def test_a_version_with_the_server_is_a_snapshot(tracking: Models, tmp_path: Path, model: str) -> None:
    version = tracking.add(model, tracking.upload(FILES), "prod")
    quoted = model.replace(" ", "%20")
    source = open_source(f"mlflow://{quoted}@prod")
    manifest = find_manifest(source)
    download(manifest, source, tmp_path / "net")
    for name, data in FILES.items():
        assert (tmp_path / "net" / name).read_bytes() == data
    verify(tmp_path / "net", find_manifest(open_source(str(tmp_path / "net"))))
    assert isinstance(source, MlflowSource)
    assert source.pinned() == f"mlflow://{quoted}/{version}"
    assert read(open_source(f"mlflow://{quoted}/{version}/sub"), "x.txt", 9) == b"x"


def test_an_alias_that_moves_does_not_move_what_was_pinned(tracking: Models) -> None:
    first = tracking.add("moves", tracking.upload(FILES), "prod")
    source = MlflowSource("mlflow://moves@prod")
    assert source.pinned() == f"mlflow://moves/{first}"
    second = tracking.add("moves", tracking.upload({"model.safetensors": save({"a": torch.ones(3)})}), "prod")
    assert find_manifest(source).total_bytes == len(WEIGHTS), "files of two versions would be mixed"
    assert find_manifest(open_source(f"mlflow://moves/{first}")).total_bytes == len(WEIGHTS)
    source.forget()
    assert source.pinned() == f"mlflow://moves/{second}"
    assert find_manifest(source).total_bytes < 1000


def refused(url: str, secrets: dict[str, str] | None = None, **how: Any) -> PilotflameError:
    with pytest.raises(PilotflameError) as caught:
        find_manifest(open_source(url, secrets, **how))
    assert caught.value.remedy
    assert HUSH not in f"{caught.value.message}{caught.value.remedy}{caught.value.details}"
    return caught.value


def test_what_is_not_there_is_named(tracking: Models) -> None:
    tracking.add("there", tracking.upload(FILES))
    for url in ("mlflow://there@none", "mlflow://there/9", "mlflow://nowhere/1"):
        assert isinstance(refused(url), SourceMissing)
    assert "mlflow://there/1/none" in refused("mlflow://there/1/none").message


# -- where a server may lead, with the double alone


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    with mlflow_double() as (found, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", found.url)
        yield found


def test_a_folder_is_read_for_the_gateways_own_server_alone(double: Models, tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for location in (str(tmp_path), tmp_path.as_uri()):
        url = f"mlflow://local/{double.add('local', location)}"
        assert find_manifest(open_source(url)).total_bytes == len(WEIGHTS)
        error = refused(url, {"MLFLOW_TRACKING_URI": double.url})
        assert isinstance(error, SourceDenied)
        assert str(tmp_path) not in error.message
        # This rule allows the address of the tracking server, so the refusal is due to the location in its answer.
        here = Access(addresses=Addresses.of(["127.0.0.1/32"]))
        assert isinstance(refused(url, access=here), SourceDenied)


def test_a_store_is_read_with_the_functions_secrets(double: Models) -> None:
    """Another source reads the store. If the function has named the server, the gateway's credentials are not used for the store."""
    with mlflow_double() as (store, _):
        folder = store.upload(FILES).removeprefix("mlflow-artifacts:/")
        url = f"mlflow://web/{double.add('web', f'{store.url}{ARTIFACTS}/{folder}')}"
        assert find_manifest(open_source(url)).total_bytes == len(WEIGHTS)
    version = double.add("hub", "hf://org/net")
    for secrets, own in (({}, False), ({"MLFLOW_TRACKING_URI": double.url}, True)):
        source = MlflowSource(f"mlflow://hub/{version}", secrets)
        assert source._store()._own is own  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "location",
    [
        "mlflow://other/1",
        "dbfs:/x",
        "ftp://host/x",
        "models:/m-1",
        "mlflow-artifacts://elsewhere/x",
        "mlflow-artifacts:/../x",
    ],
)
def test_other_places_are_refused(double: Models, location: str) -> None:
    assert isinstance(refused(f"mlflow://odd/{double.add('odd', location)}"), SourceError)


def test_the_login_is_sent_to_the_server_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with mlflow_double("ann", HUSH) as (closed, asked), mlflow_double() as (store, others):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", closed.url)
        url = f"mlflow://net/{closed.add('net', closed.upload(FILES))}"
        assert isinstance(refused(url), SourceDenied)
        login = {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": HUSH}
        own = {"MLFLOW_TRACKING_URI": closed.url, **login}
        assert find_manifest(open_source(url, own)).total_bytes == len(WEIGHTS)
        assert realm_of(url, own) != realm_of(url)
        assert isinstance(refused(url, {**own, "MLFLOW_TRACKING_PASSWORD": "wrong"}), SourceDenied)
        assert asked[-1] is not None
        there = f"{store.url}{ARTIFACTS}/{store.upload(FILES).removeprefix('mlflow-artifacts:/')}"
        find_manifest(open_source(f"mlflow://net/{closed.add('net', there)}", own))
        assert set(others) == {None}
        for name, value in login.items():
            monkeypatch.setenv(name, value)
        assert find_manifest(open_source(url)).total_bytes == len(WEIGHTS)
        with pytest.raises(SourceError, match="MLFLOW_TRACKING_URI"):
            MlflowSource(url, access=Access(own_only=True))


@pytest.mark.parametrize("endpoint", ["", "databricks", "sqlite:///x.db", "/srv/mlruns"])
def test_without_a_server_the_variable_is_named(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", endpoint)
    with pytest.raises(SourceError, match="needs MLFLOW_TRACKING_URI"):
        MlflowSource("mlflow://net/1")


@given(
    st.text(st.sampled_from("aé重 %@?#:.&+"), min_size=1, max_size=20),
    st.integers(1, 10**9),
    st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
    st.lists(st.from_regex(r"[a-z0-9@:]{1,8}", fullmatch=True), max_size=3),
)
def test_versions_are_read_as_they_are_written(
    model: str, number: int, alias: str, folders: list[str]
) -> None:
    for version, name in ((str(number), ""), ("", alias)):
        written = ModelVersion(model, version, name, "/".join(folders))
        assert ModelVersion.of(str(written)) == written


@pytest.mark.parametrize(
    "url",
    [
        "mlflow://",
        "mlflow://net",
        "mlflow://net/prod",
        "mlflow://net@",
        "mlflow://net/1/../x",
        "mlflow://a%2Fb/1",
    ],
)
def test_what_is_no_version_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="not a version"):
        ModelVersion.of(url)
