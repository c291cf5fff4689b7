"""The store after crashes: a child kills itself at each system call in turn."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import BadInput, SettingsError, UnknownFunction, UnknownRevision
from pilotflame.runtime.ground.settings.function_settings import Cors, FunctionSettings
from pilotflame.runtime.node.functions.revision_record import RevisionFields, RevisionRecord, StoredSnapshot
from pilotflame.runtime.node.functions.store import Retention, Store
from pilotflame.runtime.plugins.sqs.settings import SqsSource


def fields(name: str = "tone", **more: Any) -> RevisionFields:
    return RevisionFields(
        **{
            "code_digest": "ab" * 32,
            "settings": FunctionSettings(name=name, env={"TOKEN": "secret"}),
            "snapshots": {"": StoredSnapshot(root=Path("/weights"))},
            "python": Path("/usr/bin/python"),
            "requirements_digest": "cd" * 32,
            "handler": {"kind": "function", "input": {"type": "object"}},
        }
        | more
    )


def deploy(store: Store, name: str = "tone", content: str = "x") -> RevisionRecord:
    record = placed(store, fields(name), content)
    store.promote(record)
    return record


def placed(store: Store, revision: RevisionFields, content: str = "x") -> RevisionRecord:
    code = store.stage() / "code"
    code.mkdir()
    (code / "handler.py").write_text(content)
    return store.place(code.parent, revision)


def revisions(store: Store, name: str) -> list[RevisionRecord]:
    """Return the records that can be read, oldest first."""
    return store.function(name).records()[::-1]


def keeping(store: Store, count: int) -> Store:
    """Return a store with the same folder, which keeps `count` revisions."""
    return Store(store.curves.parent, Reports(), Retention(count))


class Reports(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def store(tmp_path: Path, reports: Reports) -> Store:
    store = Store(tmp_path, reports)
    store.start()
    return store


def staged(root: Path) -> list[Path]:
    return list((root / "staging").iterdir())


def test_compiled_code_goes_with_its_function(tmp_path: Path, reports: Reports) -> None:
    store = Store(tmp_path, reports)
    store.start()
    folders = {}
    for name in ("tone", "other", "failing"):
        record = placed(store, fields(name))
        place = store.computed.compiled(record)
        assert place is not None
        folders[name] = place.folder
        (place.folder / "key" / "inductor").mkdir(parents=True)
        if name != "failing":
            store.promote(record)
    store.withdraw(record)
    assert not folders["failing"].exists()
    store.delete("tone")
    assert set((tmp_path / "compiled").iterdir()) == {folders["other"]}
    # A crash left compiled code of a function that was deleted.
    folders["tone"].mkdir()
    Store(tmp_path, reports).start()
    assert set((tmp_path / "compiled").iterdir()) == {folders["other"]}
    assert staged(tmp_path) == []
    nothing = Store(tmp_path, reports, Retention(compiled_bytes=0))
    nothing.start()
    assert nothing.computed.compiled(record) is None
    assert not list((tmp_path / "compiled").iterdir())


def test_stored_prefixes_go_with_their_function(tmp_path: Path, reports: Reports) -> None:
    store = Store(tmp_path, reports, Retention(prefixes_bytes=7))
    store.start()
    declared = {"a": {"messages": [{"role": "system", "content": "x"}]}}
    settings = FunctionSettings.model_validate({"name": "tone", "snapshot": "w", "prefixes": declared})
    record = placed(store, fields(settings=settings))
    store.promote(record)
    kept = store.computed.prefixes(record)
    assert kept is not None
    assert (kept.declared, kept.limit_bytes) == (declared, 7)
    assert store.computed.prefixes(deploy(store)) is None
    (kept.folder / "key").mkdir(parents=True)
    Store(tmp_path, reports).start()
    assert kept.folder.exists()
    keeping(store, 2).prune("tone")
    assert kept.folder.exists()
    # The last revision that declares prefixes is pruned.
    keeping(store, 1).prune("tone")
    assert not kept.folder.exists()
    (kept.folder / "key").mkdir(parents=True)
    store.delete("tone")
    assert not kept.folder.exists()


def unprivileged(run: Callable[[Path], object]) -> None:
    """Call `run` with a new folder in a child without root's rights. The child cannot use `tmp_path` if root runs the tests."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            return
        code = 1
        try:
            if not os.getuid():
                os.chown(name, 65534, 65534)
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            run(Path(name))
            code = 0
        finally:
            # End the child here, so that neither the caller nor pytest goes on in it.
            sys.stderr.write(traceback.format_exc() if code else "")
            os._exit(code)


def lock_up(root: Path, name: str) -> Path:
    """Write prefixes into folders without any rights, with a link to a folder outside. Return the folder outside."""
    folder, outside = root / "prefixes" / name / "key", root / "outside"
    outside.mkdir(exist_ok=True)
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").touch()
    (folder / "link").symlink_to(outside)
    for locked in (outside, folder / "below", folder, folder.parent):
        locked.chmod(0)
    return outside


def test_a_function_that_locks_its_prefixes_can_be_deleted() -> None:
    def run(root: Path) -> None:
        reports = Reports()
        store = Store(root, reports)
        store.start()
        deploy(store, "tone")
        outside = lock_up(root, "tone")
        store.delete("tone")
        assert not list((root / "prefixes").iterdir())
        # A crash left locked prefixes of a deleted function, and a locked folder in `staging`.
        lock_up(root, "gone")
        shutil.copytree(root / "functions", root / "staging" / "x")
        (root / "staging" / "x").chmod(0)
        Store(root, reports).start()
        assert not list((root / "prefixes").iterdir())
        assert (staged(root), reports, stat.S_IMODE(outside.stat().st_mode)) == ([], [], 0)

    unprivileged(run)


def test_the_store_starts_whatever_is_left(tmp_path: Path, reports: Reports) -> None:
    Store(tmp_path, reports).start()
    folder = os.open(tmp_path / "staging", os.O_RDONLY)
    # Before Python 3.13, shutil cannot remove a folder that is so deep.
    for _ in range(1500):
        os.mkdir("deep", dir_fd=folder)
        below = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    try:
        Store(tmp_path, reports).start()
        assert not staged(tmp_path) or "cannot be removed completely" in reports[0]
    finally:
        # Remove the folder here, because pytest would use shutil, too.
        subprocess.run(["rm", "-r", tmp_path / "staging"], check=True)


def test_a_withdrawn_revision_leaves_compiled_code_to_the_others(store: Store, tmp_path: Path) -> None:
    place = store.computed.compiled(deploy(store))
    assert place is not None
    place.folder.mkdir(parents=True)
    store.withdraw(placed(store, fields()))
    assert place.folder.exists()


def test_the_key_of_compiled_code_is_of_what_runs(store: Store) -> None:
    changes: list[dict[str, Any]] = [{}, {"code_digest": "cd" * 32}, {"requirements_digest": "ab" * 32}]
    codes = [store.computed.compiled(placed(store, fields(**change))) for change in changes]
    assert len({place.code for place in codes if place is not None}) == 3
    again = store.computed.compiled(placed(store, fields()))
    assert again == codes[0]


@pytest.mark.parametrize("limited", [{"image": {"name": "other"}}, {"resources": {"files": "private"}}])
def test_functions_whose_disk_is_limited_keep_no_compiled_code(store: Store, limited: dict[str, Any]) -> None:
    settings = FunctionSettings.model_validate({"name": "tone", **limited})
    assert store.computed.compiled(placed(store, fields(settings=settings))) is None


def test_a_promoted_revision_is_found_again(store: Store, tmp_path: Path, reports: Reports) -> None:
    before = datetime.now(UTC)
    record = deploy(store)
    assert (record.function, record.number) == ("tone", 1)
    assert before <= record.created_at <= datetime.now(UTC)
    again = Store(tmp_path, reports)
    again.start()
    assert again.function("tone").current() == record
    assert again.functions() == {"tone": record}
    assert revisions(again, "tone") == [record]
    assert (again.code(record) / "handler.py").read_text() == "x"
    assert staged(tmp_path) == []
    assert reports == []


def test_a_revision_keeps_its_other_settings_when_a_setting_no_longer_exists(
    store: Store, tmp_path: Path, reports: Reports
) -> None:
    origins = {"cors.origins": "pilotflame.toml", "env.max_age_s": "pilotflame.toml"}
    source = SqsSource(type="sqs", queue="https://sqs.eu-west-1.amazonaws.com/1/orders")
    settings = FunctionSettings(
        name="tone", cors=Cors(origins=("*",)), env={"max_age_s": "5"}, source=(source,)
    )
    record = placed(store, fields(settings=settings, setting_origins=origins))
    store.promote(record)
    path = store.code(record).parent / "revision.json"
    stored = json.loads(path.read_text())
    stored["settings"]["cancel_grace_s"] = 5.0
    stored["settings"]["cors"]["max_age_s"] = 60
    stored["settings"]["source"][0]["visibility_s"] = 60
    stored["setting_origins"]["cors.max_age_s"] = "pilotflame.toml"
    path.write_text(json.dumps(stored))
    again = Store(tmp_path, reports)
    again.start()
    assert again.functions() == {"tone": record}
    assert reports == []


def test_secrets_are_their_owners_alone(store: Store, tmp_path: Path) -> None:
    record = deploy(store)
    assert stat.S_IMODE((tmp_path / "functions").stat().st_mode) == 0o700
    assert stat.S_IMODE((store.code(record).parent / "revision.json").stat().st_mode) == 0o600


def test_each_deploy_is_a_revision(store: Store) -> None:
    first, second = deploy(store), deploy(store)
    assert (first.number, second.number) == (1, 2)
    assert first.revision.startswith("r1-")
    # The same content has the same digest.
    assert second.revision == first.revision.replace("r1-", "r2-")
    assert store.function("tone").current() == second
    assert revisions(store, "tone") == [first, second]
    third = placed(store, fields(settings=FunctionSettings(name="tone", hold_s=1)))
    assert third.revision[3:] != first.revision[3:]


def test_there_is_nothing_before_a_deploy(store: Store, reports: Reports) -> None:
    assert store.function("tone").current() is None
    assert store.functions() == {}
    assert revisions(store, "tone") == []
    assert reports == []


def test_a_withdrawn_revision_leaves_the_live_one(store: Store, tmp_path: Path) -> None:
    store.withdraw(placed(store, fields()))
    assert not (tmp_path / "functions/tone").exists()
    live = deploy(store)
    store.withdraw(placed(store, fields()))
    assert revisions(store, "tone") == [live]
    assert store.function("tone").current() == live
    assert staged(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "A", "models", "x\0"])
def test_no_name_leaves_the_folder(store: Store, name: str) -> None:
    for call in (store.function, store.delete, store.prune):
        with pytest.raises(SettingsError):
            call(name)


def test_delete(store: Store, tmp_path: Path) -> None:
    deploy(store)
    deploy(store, "other")
    store.delete("tone")
    assert list(store.functions()) == ["other"]
    assert staged(tmp_path) == []
    with pytest.raises(UnknownFunction, match="no function 'tone'"):
        store.delete("tone")


def test_prune_keeps_the_newest_and_the_live_one(store: Store, tmp_path: Path) -> None:
    records = [deploy(store) for _ in range(5)]
    (tmp_path / "functions/tone/current").write_text(records[1].revision)
    assert keeping(store, 2).prune("tone") == [records[0].revision, records[2].revision]
    assert revisions(store, "tone") == [records[1], records[3], records[4]]
    assert keeping(store, 0).prune("tone") == [records[3].revision]
    assert deploy(store).number == 6
    assert staged(tmp_path) == []
    assert keeping(store, 1).prune("nothing") == []


def test_prune_keeps_what_is_draining(store: Store) -> None:
    records = [deploy(store) for _ in range(4)]
    assert keeping(store, 1).prune("tone", busy={records[1].revision}) == [
        records[0].revision,
        records[2].revision,
    ]


def test_prune_removes_by_size_and_counts_shared_weights_once(tmp_path: Path, reports: Reports) -> None:
    store = Store(tmp_path, reports, Retention(10, 5 << 20))
    store.start()

    def upload(weights: bytes) -> RevisionRecord:
        code = store.stage() / "code"
        code.mkdir()
        (code / "model.bin").write_bytes(weights)
        store.weights.share(code, [])
        record = store.place(code.parent, fields())
        store.promote(record)
        return record

    large = [upload(bytes([number]) * (2 << 20)) for number in range(2)]
    equal = [upload(b"same" * (1 << 19)) for _ in range(4)]
    assert len(list((tmp_path / "weights").iterdir())) == 3
    assert store.prune("tone") == [large[0].revision]
    assert revisions(store, "tone") == [large[1], *equal]
    assert len(list((tmp_path / "weights").iterdir())) == 2
    assert sum(store.function("tone").sizes().values()) < 5 << 20


def test_the_revision_to_roll_back_to(store: Store) -> None:
    records = [deploy(store) for _ in range(3)]
    assert store.function("tone").find(records[2], None) == records[1]
    assert store.function("tone").find(records[1], None) == records[0]
    for wanted in ("1", "r1", records[0].revision):
        assert store.function("tone").find(records[2], wanted) == records[0]
    with pytest.raises(UnknownRevision, match="no older revision"):
        store.function("tone").find(records[0], None)
    for wanted in ("9", "r1-00000000", "../r1", ""):
        with pytest.raises(UnknownRevision, match="no revision"):
            store.function("tone").find(records[2], wanted)
    with pytest.raises(BadInput, match="live already"):
        store.function("tone").find(records[2], "r3")


def test_a_revision_that_cannot_be_placed_leaves_nothing(store: Store, tmp_path: Path) -> None:
    staged_folder = store.stage()
    (tmp_path / "functions").chmod(0o700)
    (tmp_path / "functions/tone").touch()
    with pytest.raises(FileExistsError):
        store.place(staged_folder, fields())
    assert staged(tmp_path) == []


def test_nothing_is_pruned_where_the_live_revision_is_unknown(store: Store, tmp_path: Path) -> None:
    deploy(store), deploy(store)
    (tmp_path / "functions/tone/current").write_text("r2-")
    assert keeping(store, 1).prune("tone") == []


def test_each_thread_gets_another_number(store: Store) -> None:
    threads = [threading.Thread(target=deploy, args=(store,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.number for record in revisions(store, "tone")] == list(range(1, 9))
    assert store.function("tone").current() in revisions(store, "tone")


def _tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda folder, rev: _tear(folder / rev / "revision.json"), "revision.json is damaged"),
        (lambda folder, rev: (folder / rev / "revision.json").unlink(), "is not that revision"),
        (
            lambda folder, rev: (folder / rev / "revision.json").write_bytes(b"\xff{"),
            "revision.json is damaged",
        ),
        (lambda folder, rev: (folder / rev / "code").rename(folder / "away"), "is not that revision"),
        (lambda folder, rev: shutil.rmtree(folder / rev), "is not that revision"),
        (lambda folder, rev: (folder / "current").write_text(""), "that is not a revision's id"),
        (
            lambda folder, rev: (folder / "current").write_text("../../other/r1-00000000"),
            "that is not a revision's id",
        ),
        (lambda folder, rev: (folder / "current").write_bytes(b"\xff"), "that is not a revision's id"),
        (lambda folder, rev: (folder / "current").unlink(), "has no live revision"),
    ],
)
def test_a_damaged_revision_is_reported_and_skipped(
    store: Store, tmp_path: Path, reports: Reports, harm: Callable[[Path, str], object], expected: str
) -> None:
    other = deploy(store, "other")
    deploy(store)
    live = deploy(store)
    harm(tmp_path / "functions/tone", live.revision)
    store.start()
    assert store.functions() == {"other": other}
    assert len(reports) == 1
    assert expected in reports[0]
    assert "tone" in reports[0]
    assert deploy(store).number in (2, 3)
    assert set(store.functions()) == {"other", "tone"}


def test_a_record_in_the_wrong_place_is_reported(store: Store, tmp_path: Path, reports: Reports) -> None:
    record = deploy(store)
    shutil.copytree(tmp_path / "functions/tone", tmp_path / "functions/copy")
    (tmp_path / "functions/stray").touch()
    (tmp_path / "functions/No Name").mkdir()
    assert store.functions() == {"tone": record}
    assert len(reports) == 3


# Crashes

_STEPS = ("mkdir", "rename", "replace", "open", "fsync", "rmdir", "unlink")


def crash_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that kills itself before its system call number `step`. Return True if it did."""
    child = os.fork()
    if child == 0:
        left = step

        def killing(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*args, **more)

            return call

        status = 1
        try:
            for name in _STEPS:
                setattr(os, name, killing(getattr(os, name)))
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def crashes(
    tmp_path: Path, work: Callable[[Store], object], check: Callable[[Store, bool], None], before: int
) -> int:
    """Crash `work` at each of its steps, recover, and check. Return the number of steps."""
    for step in range(500):
        root = tmp_path / str(step)
        reports = Reports()
        store = Store(root, reports)
        store.start()
        for number in range(before):
            deploy(store, content=f"r{number + 1}")
        crashed = crash_at(step, lambda store=store: work(store))
        recovered = Store(root, reports)
        recovered.start()
        assert staged(root) == []
        check(recovered, crashed)
        assert [report for report in reports if "no live revision" not in report] == []
        deploy(recovered, content="after")
        live = recovered.function("tone").current()
        assert live is not None
        assert (recovered.code(live) / "handler.py").read_text() == "after"
        if not crashed:
            return step
    raise AssertionError("the work never ended")


def test_a_crash_in_a_first_deploy_leaves_all_or_nothing(tmp_path: Path) -> None:
    def check(store: Store, crashed: bool) -> None:
        live = store.function("tone").current()
        assert crashed or live is not None
        if live is not None:
            assert (store.code(live) / "handler.py").read_text() == "r1"

    assert crashes(tmp_path, lambda store: deploy(store, content="r1"), check, before=0) > 15


def test_a_crash_in_a_deploy_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    seen = set()

    def check(store: Store, crashed: bool) -> None:
        live = store.function("tone").current()
        assert live is not None
        assert (store.code(live) / "handler.py").read_text() == f"r{live.number}"
        assert crashed or live.number == 2
        seen.add(live.number)

    assert crashes(tmp_path, lambda store: deploy(store, content="r2"), check, before=1) > 15
    assert seen == {1, 2}


def test_a_crash_in_a_delete_leaves_all_or_nothing(tmp_path: Path) -> None:
    def check(store: Store, crashed: bool) -> None:
        assert len(revisions(store, "tone")) in ((2, 0) if crashed else (0,))
        assert (store.function("tone").current() is None) == (revisions(store, "tone") == [])

    assert crashes(tmp_path, lambda store: store.delete("tone"), check, before=2) > 3


def test_a_crash_in_a_delete_beside_running_calls_leaves_all_or_nothing(tmp_path: Path) -> None:
    """After a restart no call runs, so no revision keeps its code."""

    def check(store: Store, crashed: bool) -> None:
        assert len(revisions(store, "tone")) in ((2, 0) if crashed else (0,))
        assert (store.function("tone").current() is None) == (revisions(store, "tone") == [])
        if store.function("tone").current() is None:
            assert store.function("tone").ids() == []

    def work(store: Store) -> None:
        (busy,) = [record.revision for record in revisions(store, "tone") if record.number == 2]
        store.delete("tone", busy=[busy])

    assert crashes(tmp_path, work, check, before=2) > 5


def test_a_deleted_revision_keeps_its_code_for_its_calls_alone(store: Store, tmp_path: Path) -> None:
    _, busy = deploy(store), deploy(store)
    store.pause("tone", paused=True)
    store.delete("tone", busy=[busy.revision])
    folder = tmp_path / "functions" / "tone"
    assert [path.name for path in folder.iterdir()] == [busy.revision]
    assert [path.name for path in (folder / busy.revision).iterdir()] == ["code"]
    assert (store.functions(), store.paused(), store.environments()) == ({}, set(), set())
    new = deploy(store, content="new")
    assert new.number == 3
    assert [record.revision for record in store.function("tone").records()] == [new.revision]
    with pytest.raises(UnknownRevision):
        store.function("tone").find(new, busy.revision)
    keeping(store, 1).prune("tone", busy=[busy.revision])
    assert (folder / busy.revision).is_dir()
    assert store.sweep("tone") == [busy.revision]
    assert store.sweep("tone") == []
    assert [record.revision for record in store.function("tone").records()] == [new.revision]


def test_a_delete_that_fails_takes_no_later_deploy_along(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    busy = deploy(store)
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if ".current" in str(path) or path.name == "current":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(OSError, match="No space"):
            store.delete("tone", busy=[busy.revision])
    new = deploy(store, content="new")
    store.start()
    assert store.function("tone").current() == new


def test_a_crash_in_a_prune_leaves_whole_revisions(tmp_path: Path) -> None:
    def check(store: Store, crashed: bool) -> None:
        numbers = [record.number for record in revisions(store, "tone")]
        assert numbers in (([1, 2, 3], [2, 3], [3]) if crashed else ([3],))

    assert crashes(tmp_path, lambda store: keeping(store, 1).prune("tone"), check, before=3) > 3


def test_leftovers_of_every_kind_are_removed(store: Store, tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    (tmp_path / "staging/file").touch()
    (tmp_path / "staging/link").symlink_to(keep)
    (tmp_path / "staging/folder/code").mkdir(parents=True)
    (tmp_path / "functions/empty").mkdir()
    record = deploy(store)
    half_written = [tmp_path / "functions/tone/.current.x", store.code(record).parent / ".revision.json.x"]
    for path in half_written:
        path.touch()
    store.start()
    assert not any(path.exists() for path in half_written)
    assert store.functions() == {"tone": record}
    assert staged(tmp_path) == []
    assert keep.is_dir()
    assert not (tmp_path / "functions/empty").exists()


def test_a_function_may_make_folders_in_folders_without_end(
    store: Store, tmp_path: Path, reports: Reports
) -> None:
    store.promote(record := placed(store, fields("tone")))
    place = os.open(code := store.code(record), os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("inner", dir_fd=place)
        inner = os.open("inner", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    assert sum(store.function("tone").sizes().values()) > 0
    store.delete("tone")
    assert not code.exists()
    assert not staged(tmp_path)
    assert not reports
