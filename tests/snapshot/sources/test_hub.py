"""The Hugging Face hub as a source, against a server with its interface. One test checks this server with the hub's own client."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import PilotflameError, SourceDenied, SourceError, SourceMissing
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.download import download
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.hub import HubPlace, HubSource
from pilotflame.snapshot.sources.locate import open_source, split_file
from pilotflame.snapshot.sources.realm import realm_of
from safetensors.torch import save
from source_tests import OBJECTS, SourceTests, read

TOKEN = "hf_hush"
WEIGHTS = save({"a": torch.arange(300_000.0), "b": torch.ones(7, 3)})
FILES = {
    "model.safetensors": WEIGHTS, "config.json": b'{"layers": 1}', ".gitattributes": b"x", "README.md": b"# net",
    "onnx/model.onnx": b"o" * 2000, "sub/model.safetensors": WEIGHTS[:], "sub/config.json": b"{}",
}  # fmt: skip
DATA = random.Random(3).randbytes(200_000)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no hub here"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.endpoint)
        found.tokens.add(TOKEN)
        found.add("org/net", FILES)
        yield found


def refused(url: str, secrets: dict[str, str] | None = None) -> PilotflameError:
    with pytest.raises(PilotflameError) as caught:
        find_manifest(open_source(url, secrets))
    assert caught.value.remedy
    assert TOKEN not in f"{caught.value.message}{caught.value.remedy}{caught.value.details}"
    return caught.value


class TestHubSource(SourceTests):
    @pytest.fixture
    def source(self, hub: HubServer) -> HubSource:
        hub.add("org/tested", OBJECTS)
        return HubSource("hf://org/tested")


@pytest.mark.parametrize("terse", [False, True])
def test_the_hubs_own_client_takes_the_server_for_the_hub(
    hub: HubServer, tmp_path: Path, terse: bool
) -> None:
    hub.terse = terse
    hub.add("org/gated", FILES, gated=True, readers={"hf_other"})
    script = """
import json, sys
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
out = {"folder": snapshot_download("org/net", token="hf_hush"), "sha": HfApi().model_info("org/net").sha, "errors": []}
for repository, file, how in (
    ("org/gated", "model.safetensors", {}), ("org/none", "x", {}), ("org/net", "x", {"revision": "gone"}),
    ("org/net", "no such file", {}),
):
    try:
        hf_hub_download(repository, file, token="hf_hush", **how)
    except (EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        out["errors"].append(type(error).__name__)
print(json.dumps(out))
"""
    environ = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["sha"] == hub.repositories["org/net"].branches["main"]
    for name, data in FILES.items():
        assert Path(out["folder"], name).read_bytes() == data
    wrong = ["GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError"]
    assert out["errors"][:3] == wrong
    assert "EntryNotFoundError" in out["errors"][3]


def test_a_mirror_that_leaves_out_lengths_and_places_is_read(hub: HubServer, tmp_path: Path) -> None:
    hub.terse = True
    source = open_source("hf://org/net")
    manifest = find_manifest(source)
    download(manifest, source, tmp_path / "here")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "here" / name).read_bytes() == FILES[name]


def test_a_repository_is_a_snapshot(hub: HubServer, tmp_path: Path) -> None:
    source = open_source("hf://org/net")
    manifest = find_manifest(source)
    assert [shard.name for shard in manifest.shards] == ["model.safetensors"]
    assert {"config.json", "README.md", "sub/config.json"} == {asset.name for asset in manifest.assets}
    download(manifest, source, tmp_path / "net")
    assert (tmp_path / "net" / "model.safetensors").read_bytes() == WEIGHTS
    assert (tmp_path / "net" / "config.json").read_bytes() == FILES["config.json"]
    assert {asked.server for asked in hub.asked} == {"hub", "cdn"}
    assert all("authorization" not in asked.headers for asked in hub.asked)


def test_a_folder_and_a_file_of_a_repository(hub: HubServer) -> None:
    below = find_manifest(open_source("hf://org/net@main/sub"))
    assert [asset.name for asset in below.assets] == ["config.json"]
    folder, file = split_file("hf://org/net/sub/model.safetensors")
    assert (folder, file) == ("hf://org/net/sub", "model.safetensors")
    assert find_manifest(open_source("hf://org/net/sub/model.safetensors"), file).shards == below.shards


def test_a_branch_that_moves_does_not_move_what_was_pinned(hub: HubServer) -> None:
    repository = hub.repositories["org/net"]
    before = repository.branches["main"]
    source = HubSource("hf://org/net")
    assert source.pinned() == f"hf://org/net@{before}"
    after = repository.commit({"model.safetensors": save({"a": torch.zeros(9)})})
    assert find_manifest(source).total_bytes == len(WEIGHTS), "files of two commits would be mixed"
    assert find_manifest(open_source(source.pinned())).total_bytes == len(WEIGHTS)
    assert HubSource("hf://org/net@main").pinned() == f"hf://org/net@{after}"
    asked = len(hub.asked)
    assert HubSource(f"hf://org/net@{before}").pinned() == f"hf://org/net@{before}"
    assert len(hub.asked) == asked


def test_a_new_commit_fetches_only_the_shards_that_changed(hub: HubServer, tmp_path: Path) -> None:
    shards = {name: save({name: torch.rand(300_000)}) for name in "abc"}
    places = {name: f"{name}.safetensors" for name in shards}
    files = {places[name]: data for name, data in shards.items()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": places}).encode()
    repository = hub.add("org/shards", {**files, "README.md": b"one"})
    cache, realm = Cache([Tier(tmp_path / "tier", 64 << 20)]), realm_of("hf://org/shards")

    def fetch() -> tuple[int, list[str]]:
        """Return the number of fetched bytes, and the objects that were requested over the network."""
        source = open_source("hf://org/shards")
        manifest = find_manifest(source)
        before = len(hub.asked)
        with cache.open(manifest.with_realm(realm), source) as lease:
            lease.wait(30)
            verify(lease.root, lease.described())
            for name, data in repository.commits[repository.branches["main"]].items():
                assert (lease.root / name).read_bytes() == data
            assert lease.stats is not None
            fetched_bytes = lease.stats.fetched_bytes
        return fetched_bytes, [asked.target for asked in hub.asked[before:] if asked.server == "cdn"]

    assert fetch()[0] == sum(map(len, shards.values()))
    repository.commit({**files, "README.md": b"two"})
    assert fetch() == (0, [])
    changed = save({"b": torch.rand(300_000)})
    repository.commit({**files, places["b"]: changed})
    fetched_bytes, targets = fetch()
    assert fetched_bytes == len(changed)
    assert all(hashlib.sha256(changed).hexdigest() in target for target in targets)
    for stored in cache.list():
        with (stored.folder / "files" / places["a"]).open("r+b") as stream:
            stream.write(b"bad")
    repository.commit({**files, "README.md": b"three"})
    assert fetch()[0] == len(shards["a"])


@pytest.mark.parametrize("branch", ["v1.0", "refs/pr/3", "feature/x"])
def test_revisions_of_all_kinds(hub: HubServer, branch: str) -> None:
    sha = hub.repositories["org/net"].commit({"f": DATA, "d/f": DATA[:50]}, branch)
    written = branch if branch.startswith("refs/") else branch.replace("/", "%2F")
    source = HubSource(f"hf://org/net@{written}/d")
    assert source.pinned() == f"hf://org/net@{sha}/d"
    assert read(source, "f", 100) == DATA[:50]


def test_the_token_goes_to_the_hub_and_not_to_the_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/private", FILES, readers={TOKEN})
    assert isinstance(refused("hf://org/private"), SourceMissing)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.asked.clear()
    assert read(HubSource("hf://org/private"), "model.safetensors", 1000, 5) == WEIGHTS[5:1005]
    sent = {(asked.server, asked.headers.get("authorization")) for asked in hub.asked}
    assert sent == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}


def test_the_token_may_be_the_functions_or_that_of_the_login(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/private", FILES, readers={TOKEN})
    secrets = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.endpoint}
    assert find_manifest(open_source("hf://org/private", secrets)).total_bytes == len(WEIGHTS)
    login = Path(os.environ["HF_HOME"])
    login.mkdir()
    (login / "token").write_text(f"{TOKEN}\n")
    assert find_manifest(open_source("hf://org/private")).total_bytes == len(WEIGHTS)
    # If a function names another hub, the gateway's token must not be sent to that hub.
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.asked.clear()
    refused("hf://org/private", {"HF_ENDPOINT": hub.endpoint})
    assert hub.asked
    assert all("authorization" not in asked.headers for asked in hub.asked)


def test_a_gated_repository_says_where_to_ask(hub: HubServer) -> None:
    hub.add("org/gated", FILES, gated=True, readers={"hf_other"})
    for secrets in ({}, {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.endpoint}):
        error = refused("hf://org/gated", secrets)
        assert isinstance(error, SourceDenied)
        assert "gated" in error.message
        assert f"{hub.endpoint}/org/gated" in str(error.remedy)
    with_access = {"HF_TOKEN": "hf_other", "HF_ENDPOINT": hub.endpoint}
    assert find_manifest(open_source("hf://org/gated", with_access)).total_bytes == len(WEIGHTS)


def test_what_is_not_there_is_named(hub: HubServer) -> None:
    assert "no repository org/none" in refused("hf://org/none").message
    assert "no revision 'gone'" in refused("hf://org/net@gone").message
    assert isinstance(refused("hf://org/net@main/nowhere"), SourceMissing)
    wrong = refused("hf://org/net", {"HF_TOKEN": "hf_wrong", "HF_ENDPOINT": hub.endpoint})
    assert isinstance(wrong, SourceDenied)
    assert "HF_TOKEN" in str(wrong.remedy)


def test_a_signed_url_that_expires_in_a_fetch_is_renewed(hub: HubServer, tmp_path: Path) -> None:
    source = HubSource("hf://org/net")
    manifest = find_manifest(source)
    with_gaps = source.connect()
    with_gaps.begin("model.safetensors", 0, 1000)
    hub.expire()
    hub.asked.clear()
    assert with_gaps.read_into(memoryview(bytearray(1000))) > 0
    with_gaps.begin("model.safetensors", 1000, 5000)
    with_gaps.close()
    statuses = [(asked.server, asked.status) for asked in hub.asked]
    assert statuses == [("cdn", 403), ("hub", 302), ("cdn", 206)]
    hub.expire()
    download(manifest, source, tmp_path / "net", connections=4, part_bytes=100_000)
    verify(tmp_path / "net", find_manifest(open_source(str(tmp_path / "net"))))


@pytest.mark.parametrize(
    "url",
    [
        "hf://net",
        "hf://",
        "hf://org/net@",
        "hf://org/net@../x",
        "hf://org/../x",
        "hf://org/a--b/c",
        "hf:/org/net",
    ],
)
def test_what_is_no_repository_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="not a URL of the hub"):
        HubSource(url)


def test_a_server_that_is_no_hub_is_named(hub: HubServer) -> None:
    hub.repositories["org/net"].branches["main"] = "odd"
    hub.repositories["org/net"].commits["odd"] = FILES
    assert "does not answer as the Hugging Face hub does" in refused("hf://org/net").message


NAME = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.]{0,20}", fullmatch=True).filter(
    lambda name: ".." not in name and "--" not in name
)


@given(
    NAME,
    NAME,
    st.from_regex(r"[\w.-]{1,20}(/[\w-]{1,5})?|refs/pr/[0-9]{1,3}", fullmatch=True),
    st.lists(NAME, max_size=3),
)
def test_places_are_read_as_they_are_written(org: str, name: str, revision: str, folders: list[str]) -> None:
    if revision in {".", ".."} or (
        revision.startswith(("./", "../", "refs/")) and not revision.startswith("refs/pr/")
    ):
        return
    place = HubPlace(f"{org}/{name}", revision, "/".join(folders))
    assert HubPlace.of(str(place)) == place
