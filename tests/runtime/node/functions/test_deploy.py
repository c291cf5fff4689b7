"""Preparing a deploy with a real store and real folders; a failed deploy leaves nothing."""

import io
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.errors import (
    CodeError,
    HeaderError,
    PilotflameError,
    RequirementsError,
    SettingsError,
    SnapshotCorrupt,
    SnapshotError,
)
from pilotflame.handlers.recognise import installed_dialects
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.access.deploy_policy import DeployPolicies
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings, Scale
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.node.functions.deploy import (
    Deployment,
    Preparation,
    fair_threads,
    heavy_imports,
    requirements_of,
    worker_spec,
)
from pilotflame.runtime.node.functions.progress import DeployProgress
from pilotflame.runtime.node.functions.revision_record import RevisionFields, RevisionRecord
from pilotflame.runtime.node.functions.store import Store
from pilotflame.runtime.node.packaging.requirements import requirements_digest
from pilotflame.runtime.node.packaging.snapshots import MANIFEST_FILE
from pilotflame.snapshot.format.compared import ComparedShards
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from safetensors.torch import save_file

HANDLER = "def handler(event): return event\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "state", lambda _text: None)
    store.start()
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "tone"
    root.mkdir()
    (root / "handler.py").write_text(HANDLER)
    return root


def prepared(store: Store, folder: Path | None = None, **request: Any) -> tuple[Path, RevisionFields]:
    return preparation(
        store, (folder and folder.parent / "env") or Path("/nowhere"), Deployment(path=folder, **request)
    ).run()


def preparation(
    store: Store, environments: Path, request: Deployment, log: Callable[[str], None] = lambda _text: None
) -> Preparation:
    return Preparation(
        store, environments, installed_dialects(), request, log, lambda _function: {}, DeployProgress(),
        lambda _settings, _outside: None, DeployPolicies(),
    )  # fmt: skip


def spec_of(store: Store, record: RevisionRecord) -> WorkerSpec:
    return worker_spec(store, record, Path("cache"), installed_dialects(), DeployPolicies())


def published(store: Store, made: tuple[Path, RevisionFields]) -> RevisionRecord:
    record = store.place(*made)
    store.promote(record)
    return record


def archive(files: dict[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def staged(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "state" / "staging").iterdir())


def test_a_folder_is_copied_and_described(store: Store, folder: Path) -> None:
    (folder / "pilotflame.toml").write_text('name = "chime"\nconcurrency = 3\nthreads = 2\n[env]\nA = "1"\n')
    made = prepared(store, folder)
    (folder / "handler.py").write_text("changed after")
    assert (made[0] / "code/handler.py").read_text() == HANDLER
    assert (made[1].settings.name, made[1].python) == ("chime", Path(sys.executable))
    record = published(store, made)
    spec = spec_of(store, record)
    assert (spec.function, spec.revision, spec.concurrency, spec.threads) == ("chime", record.revision, 3, 2)
    assert (spec.env, spec.weights, spec.preload) == ({"A": "1"}, (), ())
    assert (spec.code / "handler.py").read_text() == HANDLER


def test_an_archive_is_the_same_as_its_folder(store: Store, folder: Path) -> None:
    (folder / "pilotflame.toml").write_text('name = "tone"\n')
    uploaded = prepared(store, archive=archive({"handler.py": HANDLER, "pilotflame.toml": 'name = "tone"\n'}))
    assert uploaded[1].code_digest == prepared(store, folder)[1].code_digest
    assert uploaded[1].settings.name == "tone"


def test_an_archive_has_the_name_of_the_folder_that_it_was_packed_from(store: Store, tmp_path: Path) -> None:
    packed = archive({"handler.py": HANDLER})
    fields = prepared(store, archive=packed, folder_name="My Tone")[1]
    assert (fields.settings.name, fields.setting_origins["name"]) == ("my-tone", "the folder's name")
    named = prepared(store, archive=packed, folder_name="tone", overrides={"name": "chime"})[1]
    assert named.settings.name == "chime"
    unnamed = len(staged(tmp_path))
    for folder_name in ("", "…"):
        with pytest.raises(SettingsError, match=r"The uploaded folder has no name.*set=name=NAME"):
            prepared(store, archive=packed, folder_name=folder_name)
    assert len(staged(tmp_path)) == unnamed


def test_an_archive_of_another_program_brings_no_credentials(store: Store) -> None:
    packed = archive({"handler.py": HANDLER, ".env": "TOKEN=1", "a.pem": "x"})
    staged_folder, fields = prepared(store, archive=packed, folder_name="tone")
    assert [path.name for path in (staged_folder / "code").iterdir()] == ["handler.py"]
    again = prepared(store, archive=archive({"handler.py": HANDLER}), folder_name="tone")
    assert fields.code_digest == again[1].code_digest


def test_the_requirements_of_a_stored_revision_are_those_of_its_deploy(store: Store, folder: Path) -> None:
    (folder / "handler.py").rename(folder / "predict.py")
    (folder / "predict.py").write_text(
        "from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def predict(self): ...\n"
    )
    (folder / "cog.yaml").write_text(
        'build:\n  python_packages: ["pydantic"]\npredict: "predict.py:Predictor"\n'
    )
    (folder / "requirements.txt").write_text("packaging\n")
    record = published(store, prepared(store, folder))
    text = requirements_of(spec_of(store, record), installed_dialects())
    assert requirements_digest(text) == record.requirements_digest != requirements_digest("packaging\n")
    assert record.setting_origins["name"] == "the folder's name"


def test_the_same_content_has_the_same_digest_and_other_content_another(store: Store, folder: Path) -> None:
    first, second = prepared(store, folder), prepared(store, folder)
    (folder / "handler.py").write_text("def handler(event): return 2\n")
    assert first[1].code_digest == second[1].code_digest != prepared(store, folder)[1].code_digest


def test_overrides_win_over_the_file(store: Store, folder: Path) -> None:
    (folder / "pilotflame.toml").write_text("concurrency = 3\n[scale]\nmax = 2\n")
    settings = prepared(store, folder, overrides={"scale.max": 7})[1].settings
    assert (settings.scale.max, settings.concurrency) == (7, 3)


def test_processors_are_shared_out_unless_the_settings_name_threads(store: Store, folder: Path) -> None:
    spec = spec_of(store, published(store, prepared(store, folder, overrides={"scale.max": 1000})))
    assert spec.threads == 1
    one, two = (FunctionSettings(name="f", scale=Scale(max=workers)) for workers in (1, 2))
    assert fair_threads(one) >= fair_threads(two) >= 1
    # `resources.cpus` limits the processors that the workers share.
    assert fair_threads(one.model_copy(update={"resources": Resources(cpus=1.5)})) == 1


@pytest.mark.parametrize(
    ("settings", "parks"),
    [
        ("", False),
        ("scale.park_after_s = 5", True),
        ("resources = {gpus = 1, gpu_memory_mb = 4096}", True),
        # The gateway does not park such workers: it ends them to make room.
        ("resources.gpus = 1", False),
    ],
)
def test_workers_know_whether_the_gateway_may_park_them(
    store: Store, folder: Path, settings: str, parks: bool
) -> None:
    (folder / "pilotflame.toml").write_text(f"wait_for_weights = true\n{settings}\n")
    spec = spec_of(store, published(store, prepared(store, folder)))
    assert (spec.parks, spec.wait_for_weights) == (parks, True)


BROKEN: dict[str, tuple[Callable[[Path], object], type[PilotflameError], str]] = {
    "unknown setting": (lambda f: (f / "pilotflame.toml").write_text("concurency = 1\n"), SettingsError, "concurrency"),
    "broken settings": (lambda f: (f / "pilotflame.toml").write_text("x = ["), SettingsError, "pilotflame.toml"),
    "requirements in UTF-16": (lambda f: (f / "requirements.txt").write_text("packaging", encoding="utf-16"), RequirementsError, "not UTF-8"),
    "unmet requirement": (lambda f: (f / "requirements.txt").write_text("no-such-package>=1\n"), RequirementsError, "no-such-package"),
    "missing weights": (lambda f: (f / "pilotflame.toml").write_text('snapshot = "weights"\n'), SnapshotError, "does not exist"),
    "link that leaves": (lambda f: (f / "out").symlink_to("/etc"), CodeError, "out"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_an_invalid_folder_is_refused_and_leaves_nothing(
    store: Store, folder: Path, tmp_path: Path, name: str
) -> None:
    breaks, kind, message = BROKEN[name]
    breaks(folder)
    with pytest.raises(kind, match=message) as caught:
        prepared(store, folder)
    assert caught.value.remedy
    assert staged(tmp_path) == []
    assert store.functions() == {}


@pytest.mark.parametrize(
    ("request_fields", "kind"),
    [
        ({}, SettingsError),
        ({"path": Path("relative")}, SettingsError),
        ({"path": Path("/no/such/folder")}, PilotflameError),
        ({"archive": b"not a tar"}, CodeError),
        ({"archive": archive({"../escape.py": "x"})}, CodeError),
        ({"overrides": {"scale.mx": 1}, "archive": archive({"handler.py": HANDLER})}, SettingsError),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_leaves_nothing(
    store: Store, tmp_path: Path, request_fields: dict[str, Any], kind: type[PilotflameError]
) -> None:
    with pytest.raises(kind) as caught:
        preparation(store, tmp_path / "env", Deployment(**request_fields)).run()
    assert caught.value.remedy
    assert staged(tmp_path) == []


# -- weights


@pytest.mark.parametrize("key", ["image.base", "image.packages"])
def test_an_image_that_was_not_built_is_refused(store: Store, folder: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(SettingsError, match=r"image\.name is not set\..*`pilotflame build`"):
        prepared(store, folder, overrides={key: "cuda"})
    assert staged(tmp_path) == []
    prepared(store, folder, overrides={key: "cuda", "image.name": "localhost/built:1"})


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    root = tmp_path / "weights"
    root.mkdir()
    save_file({"w": torch.arange(4.0)}, root / "model.safetensors")
    return root


def test_weights_elsewhere_stay_there_and_get_a_manifest_of_the_revision(
    store: Store, folder: Path, weights: Path
) -> None:
    lines: list[str] = []
    request = Deployment(path=folder, overrides={"snapshot": str(weights)})
    made = preparation(store, folder / "env", request, lines.append).run()
    record = published(store, made)
    spec = spec_of(store, record)
    (found,) = spec.weights
    assert (found.name, found.root, found.source, found.cache) == ("", weights, "", None)
    assert found.manifest == spec.code.parent / MANIFEST_FILE
    assert [entry.name for entry in Manifest.read(found.manifest).tensors] == ["w"]
    # Nothing is written into the folder of the weights.
    assert not (weights / MANIFEST_NAME).exists()
    assert any(str(weights) in line for line in lines)


def test_weights_inside_the_folder_are_not_copied(store: Store, folder: Path, weights: Path) -> None:
    weights.rename(folder / "weights")
    made = prepared(store, folder, overrides={"snapshot": "weights"})
    assert not (made[0] / "code/weights").exists()
    (found,) = spec_of(store, published(store, made)).weights
    assert found.root == folder / "weights"


def test_named_weights_have_a_manifest_each_and_are_not_copied(
    store: Store, folder: Path, weights: Path, tmp_path: Path
) -> None:
    weights.rename(folder / "base")
    (other := tmp_path / "other").mkdir()
    save_file({"v": torch.arange(3.0)}, other / "adapter_model.safetensors")
    toml = f'name = "chime"\n[snapshots]\nbase = "base"\nstyle = "{other}"\n'
    (folder / "pilotflame.toml").write_text(toml)
    made = prepared(store, folder)
    assert not (made[0] / "code/base").exists()
    spec = spec_of(store, published(store, made))
    assert [(one.name, one.root) for one in spec.weights] == [("base", folder / "base"), ("style", other)]
    names = [[entry.name for entry in Manifest.read(one.manifest).tensors] for one in spec.weights]
    assert names == [["w"], ["v"]]
    # A snapshot that cannot be used is named.
    (other / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(HeaderError, match=r"^snapshots\.style: "):
        prepared(store, folder)
    with pytest.raises(
        SnapshotError, match=r"^snapshots\.style is '/nowhere': /nowhere does not exist"
    ) as told:
        prepared(store, folder, overrides={"snapshots.style": "/nowhere"})
    assert "`snapshots.style`" in told.value.remedy


def test_uploaded_weights_move_with_their_revision(store: Store, weights: Path) -> None:
    data = (weights / "model.safetensors").read_bytes()
    files: dict[str, str | bytes] = {
        "handler.py": HANDLER,
        "weights/model.safetensors": data,
        "pilotflame.toml": 'name = "tone"\nsnapshot = "weights"\n',
    }
    spec = spec_of(store, published(store, prepared(store, archive=archive(files))))
    (found,) = spec.weights
    assert found.root == spec.code / "weights"
    assert (found.root / "model.safetensors").read_bytes() == data


def test_uploaded_named_weights_move_with_their_revision(store: Store, weights: Path) -> None:
    data = (weights / "model.safetensors").read_bytes()
    files: dict[str, str | bytes] = {
        "handler.py": HANDLER,
        "one/model.safetensors": data,
        "two/model.safetensors": data,
        "pilotflame.toml": 'name = "tone"\n[snapshots]\na = "one"\nb = "two/model.safetensors"\n',
    }
    spec = spec_of(store, published(store, prepared(store, archive=archive(files))))
    assert {one.name: one.root.relative_to(spec.code).as_posix() for one in spec.weights} == {
        "a": "one", "b": "two/model.safetensors",
    }  # fmt: skip
    assert all(one.root.exists() and one.manifest.exists() for one in spec.weights)


def test_a_manifest_beside_the_weights_is_taken(store: Store, folder: Path, weights: Path) -> None:
    (weights / MANIFEST_NAME).write_text("{}")
    with pytest.raises(SnapshotError):
        prepared(store, folder, overrides={"snapshot": str(weights)})


def test_a_revision_has_copies_of_the_assets_and_links_to_the_rest(
    store: Store, folder: Path, weights: Path
) -> None:
    (weights / "pooling").mkdir()
    for name, text in {
        "config.json": "one",
        "pooling/config.json": "two",
        "pooling/model.onnx": "graph",
    }.items():
        (weights / name).write_text(text)
    made = prepared(store, folder, overrides={"snapshot": str(weights)})
    (found,) = spec_of(store, published(store, made)).weights
    assert found.assets is not None
    assert {path.relative_to(found.assets).as_posix() for path in found.assets.rglob("*") if path.is_symlink()} == {
        "model.safetensors", "pooling/model.onnx",
    }  # fmt: skip
    (weights / "config.json").write_text("other")
    (weights / "pooling/config.json").unlink()
    assert (found.assets / "config.json").read_text() == "one"
    assert (found.assets / "pooling/config.json").read_text() == "two"
    assert (found.assets / "model.safetensors").samefile(weights / "model.safetensors")
    # The file may have no version, because it may have changed within the last tick of the clock.
    assert set(found.versions) <= {"model.safetensors"}


def test_revisions_share_large_assets(store: Store, folder: Path, weights: Path) -> None:
    (weights / "tokenizer.json").write_bytes(bytes(1 << 20))
    inodes = set[int]()
    for _ in range(2):
        record = published(store, prepared(store, folder, overrides={"snapshot": str(weights)}))
        (found,) = spec_of(store, record).weights
        assert found.assets is not None
        inodes.add((found.assets / "tokenizer.json").stat().st_ino)
    assert len(inodes) == 1
    assert (weights / "tokenizer.json").stat().st_ino not in inodes


def test_a_link_to_a_version_of_the_weights_is_followed_at_the_deploy(
    store: Store, folder: Path, weights: Path, tmp_path: Path
) -> None:
    (current := tmp_path / "current").symlink_to(weights)
    made = prepared(store, folder, overrides={"snapshot": str(current)})
    (found,) = spec_of(store, published(store, made)).weights
    assert found.root == weights


def test_weights_with_a_manifest_are_compared_once_for_all_deploys(
    store: Store, folder: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = list[int](), ComparedShards._read
    monkeypatch.setattr(
        ComparedShards, "_read", lambda self, number, file: reads.append(number) or read(self, number, file)
    )
    create(weights).write(weights / MANIFEST_NAME)
    # Wait for longer than a tick of the clock of files, so that the files get versions.
    time.sleep(0.03)
    for _ in range(3):
        store.promote(published(store, prepared(store, folder, overrides={"snapshot": str(weights)})))
    assert reads == [0]
    (weights / "config.json").write_text("one")
    create(weights).write(weights / MANIFEST_NAME)
    (weights / "config.json").write_text("two")
    with pytest.raises(SnapshotCorrupt, match=r"Asset config\.json"):
        prepared(store, folder, overrides={"snapshot": str(weights)})


# -- imports shared in a base zygote


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch", ("torch",)),
        ("import torch.nn.functional as F", ("torch",)),
        ("from torch import nn", ("torch",)),
        ("def handler(event):\n    import numpy", ("numpy",)),
        ("from transformers import AutoModel", ("torch", "transformers.modeling_utils")),
        ("from sentence_transformers import SentenceTransformer", ("torch", "transformers.modeling_utils")),
        ("import transformers, numpy", ("numpy", "torch", "transformers.modeling_utils")),
        ("from .torch import x", ()),
        ("import torchvision, json", ()),
        ("# import torch\nx = 'import torch'", ()),
        ("import torch\ndef (", ()),
        ("x = '\x00'", ()),
        ("", ()),
    ],
)
def test_heavy_imports_are_read_without_running(tmp_path: Path, text: str, found: tuple[str, ...]) -> None:
    (tmp_path / "handler.py").write_text(text)
    assert heavy_imports(tmp_path / "handler.py") == found


def test_a_handler_that_cannot_be_read_shares_nothing(tmp_path: Path) -> None:
    assert heavy_imports(tmp_path / "missing.py") == ()
