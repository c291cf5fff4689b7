"""Azure Blob Storage as a source, against azurite, which checks signatures."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import random
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import parse_qsl

import obstore
import pytest
import torch
from obstore.store import AzureStore
from pilotflame.errors import PilotflameError, SourceDenied, SourceError, SourceMissing
from pilotflame.snapshot.caching.download import download
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources import cloud
from pilotflame.snapshot.sources.azure import AzureSource
from pilotflame.snapshot.sources.locate import open_source
from pilotflame.snapshot.sources.location import Location
from safetensors.torch import save
from source_tests import OBJECTS, SourceTests, read

pytestmark = pytest.mark.usefixtures("bare_environment")

DATA = random.Random(7).randbytes(300_000)
WEIGHTS = save({"a": torch.arange(200_000.0), "b": torch.ones(7, 3)})
# The account that azurite has; its key is public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of azurite's account."""
    if AZURITE is None:
        pytest.skip("azurite is not installed: npm install azurite, and name its azurite-blob in AZURITE")
    folder = tmp_path_factory.mktemp("azurite")
    command = [AZURITE, "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck",
               "--disableTelemetry"]  # fmt: skip
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    drain = threading.Thread(target=server.stdout.read, daemon=True)
    try:
        lines = []
        while not (
            found := re.search(r"listen\w* (?:on|at) (http://127\.0\.0\.1:\d+)", lines[-1] if lines else "")
        ):
            lines.append(server.stdout.readline())
            assert lines[-1], lines
        drain.start()
        yield f"{found[1]}/{ACCOUNT}"
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()


@pytest.fixture
def secrets(endpoint: str) -> dict[str, str]:
    """The secrets with which a function reads with the account's key."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY, "AZURE_STORAGE_ENDPOINT": endpoint,
    }  # fmt: skip


@pytest.fixture(scope="module")
def filled(endpoint: str) -> AzureStore:
    """Container `weights` with a model below `llama 8b`."""
    signed = AzureStore("weights", account_name=ACCOUNT, account_key=KEY, endpoint=endpoint,
                        client_options={"allow_http": True})  # fmt: skip
    create_container(endpoint)
    for name, data in {
        "model.safetensors": WEIGHTS,
        "config.json": b"{}",
        "d/ä b+c%.json": b"0123456789",
    }.items():
        obstore.put(signed, f"llama 8b/{name}", data)
    obstore.put(signed, "llama 8b-other/f", DATA)
    return signed


def create_container(endpoint: str) -> None:
    """Create container `weights` with a request that is signed with the account's key, because obstore cannot create containers."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    said = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text = "PUT" + "\n" * 12 + said + f"/{ACCOUNT}/{ACCOUNT}/weights\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = HTTPConnection(endpoint.split("/")[2], timeout=20)
    connection.request("PUT", f"/{ACCOUNT}/weights?restype=container", headers=headers)
    response = connection.getresponse()
    assert response.status == 201, response.read()
    connection.close()


class TestAzureSource(SourceTests):
    @pytest.fixture
    def source(self, filled: AzureStore, secrets: dict[str, str], tmp_path: Path) -> AzureSource:
        for name, data in OBJECTS.items():
            obstore.put(filled, f"{tmp_path.name}/{name}", data)
        return AzureSource(f"az://weights/{tmp_path.name}", secrets)


def test_a_prefix_of_a_container_is_a_snapshot(
    filled: AzureStore, secrets: dict[str, str], tmp_path: Path
) -> None:
    del filled
    source = open_source("az://weights/llama 8b/", secrets)
    assert isinstance(source, AzureSource)
    assert source.names() == ["config.json", "d/ä b+c%.json", "model.safetensors"]
    assert read(source, "d/ä b+c%.json", 4, 3) == b"3456"
    download(find_manifest(source), source, tmp_path / "x", connections=3, part_bytes=100_000)
    verify(tmp_path / "x", find_manifest(open_source(str(tmp_path / "x"))))


def test_the_environment_serves_the_gateway_and_not_a_function_with_secrets(
    filled: AzureStore, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del filled
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    source = AzureSource("az://weights/llama 8b")
    assert read(source, "config.json", 2) == b"{}"
    assert "config.json" in source.names()
    own = AzureSource("az://weights/llama 8b", {name: secrets[name] for name in secrets if "KEY" not in name})
    for use in (lambda: own.stat("config.json"), own.names):
        with pytest.raises(PilotflameError, match="anonymously"):
            use()


def test_a_shared_access_signature_suffices(filled: AzureStore, secrets: dict[str, str]) -> None:
    obstore.put(filled, "plain/config.json", b"{}")
    obstore.put(filled, "plain/other.json", b"{}")
    url = obstore.sign(filled, "GET", "plain/config.json", timedelta(hours=1))
    given = {**secrets, "AZURE_STORAGE_SAS_KEY": f"?{url.partition('?')[2]}"}
    del given["AZURE_STORAGE_ACCOUNT_KEY"]
    source = AzureSource("az://weights/plain", given)
    assert read(source, "config.json", 2) == b"{}"
    with pytest.raises(SourceDenied, match="shared access signature") as caught:
        source.stat("other.json")
    assert "sig=" not in f"{caught.value.message}{caught.value.details}"


def test_a_signature_that_has_expired_is_renewed(
    filled: AzureStore, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del filled
    from pilotflame.snapshot.sources import azure

    monkeypatch.setattr(azure, "SIGNED_FOR", timedelta(minutes=-4))
    source = AzureSource("az://weights/llama 8b", secrets)
    expired = source.locate("model.safetensors", fresh=False)
    monkeypatch.setattr(azure, "SIGNED_FOR", cloud.SIGNED_FOR)
    connection = source.connect()
    connection.begin("model.safetensors", 0, 10)
    connection.close()
    assert source.locate("model.safetensors", fresh=False) != expired


def test_what_is_not_there_and_what_is_refused_is_named(filled: AzureStore, secrets: dict[str, str]) -> None:
    del filled
    with pytest.raises(SourceMissing, match=r"az://weights/llama 8b/nope.*BlobNotFound"):
        AzureSource("az://weights/llama 8b", secrets).stat("nope")
    with pytest.raises(SourceMissing) as caught:
        find_manifest(AzureSource("az://nowhere/x", secrets))
    assert caught.value.details["code"] == "NoSuchBucket"
    other = {**secrets, "AZURE_STORAGE_ACCOUNT_KEY": KEY[::-1].lstrip("=") + "=="}
    with pytest.raises(SourceDenied, match="with the account's key") as denied:
        AzureSource("az://weights", other).stat("x")
    assert other["AZURE_STORAGE_ACCOUNT_KEY"] not in denied.value.message
    with pytest.raises(SourceError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        AzureSource("az://weights/x", {"AZURE_STORAGE_ACCOUNT_KEY": KEY})


def test_an_account_that_nobody_answers_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setitem(cloud.RETRIES, "max_retries", 0)
        own = {"AZURE_STORAGE_ACCOUNT_NAME": "x", "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        own["AZURE_STORAGE_ENDPOINT"] = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(PilotflameError, match=r"az://weights: the store failed"):
            AzureSource("az://weights", own).names()


# -- without a server

PLACE = "https://acct.blob.core.windows.net/weights/llama/a%20b"


def located(**more: str) -> Location:
    named = {f"AZURE_{name}": value for name, value in more.items()}
    source = AzureSource("az://weights/llama", {"AZURE_STORAGE_ACCOUNT_NAME": "acct", **named})
    return source.resolve("a b")


def test_each_credential_goes_where_azure_reads_it() -> None:
    for name in ("STORAGE_SAS_KEY", "STORAGE_SAS_TOKEN"):
        assert located(**{name: "?sv=1&sig=x"}) == Location(f"{PLACE}?sv=1&sig=x")
    version = {"x-ms-version": "2023-11-03"}
    assert located(STORAGE_TOKEN="t") == Location(PLACE, {"Authorization": "Bearer t", **version})
    assert located() == located(SKIP_SIGNATURE="1", STORAGE_TOKEN="t") == Location(PLACE, version)


@pytest.mark.parametrize("name", ["ACCOUNT_KEY", "ACCESS_KEY", "MASTER_KEY"])
def test_a_key_signs_the_fields_of_a_service_signature(name: str) -> None:
    url, _, query = located(**{f"STORAGE_{name}": KEY}).url.partition("?")
    given = dict(parse_qsl(query))
    # In the order of "Create a service SAS" for version 2020-12-06, from signedPermissions to rsct.
    fields = [
        given["sp"], given["st"], given["se"], "/blob/acct/weights", "", "", "", given["sv"], given["sr"],
        "", "", "", "", "", "", "",
    ]  # fmt: skip
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(fields).encode(), hashlib.sha256)
    assert (url, given["sig"]) == (PLACE, base64.b64encode(digest).decode())
    assert (given["sp"], given["sv"], given["sr"]) == ("r", "2020-12-06", "c")
    with pytest.raises(SourceDenied, match="not base64"):
        located(**{f"STORAGE_{name}": "!"})


def test_without_a_credential_the_gateway_uses_its_machine_and_a_function_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = AzureSource("az://weights", {"AZURE_STORAGE_ACCOUNT_NAME": "acct"})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acct")
    assert own.credentials == "anonymously, as configured"
    assert AzureSource("az://weights").credentials == "with the identity of this machine"
