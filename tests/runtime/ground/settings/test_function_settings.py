"""A function's settings from pilotflame.toml and overrides, and the messages for mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pilotflame.errors import SettingsError
from pilotflame.runtime.ground.settings.function_settings import (
    Cors,
    FunctionSettings,
    Scale,
    check_name,
    read_settings,
    setting_origins,
    slug,
)
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.ground.settings.schedule import Schedule
from pilotflame.runtime.plugins.sqs.settings import SqsSource
from pydantic import ValidationError


def folder_with(tmp_path: Path, toml: str, name: str = "sentiment") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "pilotflame.toml").write_text(toml)
    return folder


def problem(tmp_path: Path, toml: str, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        read_settings(folder_with(tmp_path, toml), overrides=overrides)
    assert caught.value.remedy
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_a_file_there_are_defaults_and_the_folders_name(tmp_path: Path) -> None:
    folder = tmp_path / "My Sentiment_Function"
    folder.mkdir()
    settings = read_settings(folder)
    assert settings == FunctionSettings(name="my-sentiment-function")
    assert settings.scale == Scale(min=0, max=4, buffer=0, idle_timeout_s=None, rest="zygote")


def test_the_file_is_read(tmp_path: Path) -> None:
    settings = read_settings(
        folder_with(
            tmp_path,
            """
            name = "tone"
            handler = "app/predict.py:Predictor"
            snapshot = "weights"
            timeout_s = 30
            env = { MODE = "fast" }
            [scale]
            max = 8
            rest = "local"
            """,
        )
    )
    assert settings.name == "tone"
    assert settings.handler == "app/predict.py:Predictor"
    assert settings.timeout_s == 30.0
    assert settings.env == {"MODE": "fast"}
    assert (settings.scale.max, settings.scale.rest) == (8, "local")
    assert settings.snapshot_paths(tmp_path) == {"": (tmp_path / "weights").resolve()}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("store = 'logs'", "request_log.store is 'logs'; allowed: s3://"),
        ("store = '/logs/../etc'", "request_log.store is '/logs/../etc'"),
        ("store = 's3://user:key@bucket'", "request_log.store is"),
        ("store = 'https://example.com'", "request_log.store is 'https://example.com'"),
        ("statistics = ['age']", "'age' is no pointer into a call; write it as /input/age"),
        ("statistics = ['/input/~2']", "'/input/~2' is no pointer"),
        ("store = '/logs'\nredact = ['/user']", "'/user' is no pointer"),
        ("store = '/logs'\nsample = 0", "request_log.sample"),
        ("redact = ['name']", "request_log.redact is set, but request_log.store is not"),
        ("format = 'csv'", "request_log.format"),
        (
            "format = 'parquet'\nstatistics = ['/input/age']",
            "request_log.format is set, but request_log.store is not",
        ),
    ],
)
def test_a_request_log_names_a_store_and_fields_of_calls(tmp_path: Path, table: str, said: str) -> None:
    assert said in problem(tmp_path, f"[request_log]\n{table}")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        FunctionSettings(name="a").name = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (
            "scale.idle_timout_s = 5",
            "scale.idle_timout_s is not a setting; did you mean scale.idle_timeout_s?",
        ),
        ("idle_timeout_s = 5", "idle_timeout_s is not a setting; did you mean scale.idle_timeout_s?"),
        ("timout_s = 5", "timout_s is not a setting; did you mean timeout_s?"),
        ("max_workers = 5", "max_workers is not a setting"),
        ("[budgett]\nmoney_per_day = 1", "did you mean budget?"),
        ("handler = 'shop.main.handle'", "here shop/main.py:handle"),
        ("qqq = 5", "qqq is not a setting; there are name, handler"),
        ("cors.max_age_s = 60", "cors.max_age_s no longer exists; remove it. A fixed value has replaced it."),
        ('scale.max = "8"', "scale.max is '8'; it should be a valid integer."),
        ("scale.max = 0", "scale.max is 0; it should be greater than or equal to 1."),
        # The JSON encoder refuses such a number, so it would break the list of all functions.
        (f"snapshot_part.slices.w = [0, 0, {10**30}]", "it should be less than or equal to 65536."),
        ("snapshot_part.slices.w = [0, -1, 2]", "it should be greater than or equal to 0."),
        ("scale.max = true", "scale.max is True; it should be a valid integer"),
        ('scale.rest = "off"', "scale.rest is 'off'; it should be 'zygote' or 'local'."),
        ("scale.min = 5", "scale.min is 5, more than scale.max, which is 4."),
        ("scale.buffer = 5", "scale.buffer is 5, more than scale.max, which is 4."),
        (
            "[scale]\nslow_share = 0.01\nidle_timeout_s = 1",
            "scale.slow_share and scale.idle_timeout_s exclude each other",
        ),
        ("scale = 3", "scale is 3; it should be a table."),
        (
            "alerts.error_share = 0.5",
            "alerts.error_share is set, but alerts.url is not; set alerts.url, or remove it.",
        ),
        ('alerts.url = "chat.example"', "alerts.url is 'chat.example'"),
        ("timeout_s = 0", "timeout_s is 0; it should be greater than 0"),
        ("timeout_s = nan", "timeout_s is nan; it should be a finite number"),
        ("hold_s = inf", "hold_s is inf; it should be a finite number"),
        ("max_body_bytes = -1", "max_body_bytes is -1; it should be greater than or equal to 1."),
        ('idempotent = "yes"', "idempotent is 'yes'; it should be a valid boolean."),
        ("env.TOKEN = 12345", "env.TOKEN is of type int; it should be text."),
        ("env = 3", "env is 3; it should be a table."),
        ('env."9A" = "x"', "env.9A is not a variable's name"),
        ('env.PILOTFLAME_X = "x"', "env.PILOTFLAME_X begins with PILOTFLAME_, which is reserved."),
        ('name = "Sentiment"', "name is 'Sentiment'; allowed: 1 to 63 of a-z"),
        ('name = "a-"', "name is 'a-'; allowed"),
        ('name = "a\\n"', "name is 'a\\n'; allowed"),
        ('name = "models"', "name is 'models', which is reserved"),
        ('handler = "../x.py"', "handler is '../x.py'; allowed: a .py file in the folder"),
        ('handler = "/x.py"', "handler is '/x.py'; allowed"),
        ('handler = "x"', "handler is 'x'; allowed"),
        ('handler = "./x.py"', "handler is './x.py'; allowed"),
        ('handler = "x.py:a-b"', "after the colon there must be a Python name"),
        ('handler = "x.py:"', "after the colon there must be a Python name"),
        ('snapshot = ""', "snapshot is ''; allowed"),
    ],
)
def test_a_mistake_is_reported_with_its_key(tmp_path: Path, toml: str, expected: str) -> None:
    assert expected in problem(tmp_path, toml)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    message = problem(tmp_path, "concurrency = 0\nqueue_max = 3\n[scale]\nmax = 0", {"scale.mim": "1"})
    for key in (
        "concurrency is 0",
        "queue_max is not",
        "scale.max is 0",
        "scale.mim is not a setting; did you mean scale.min?",
    ):
        assert key in message


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    assert "12345" not in problem(tmp_path, "env.TOKEN = 12345")


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path: Path) -> None:
    message = problem(tmp_path, "name = \n")
    assert "pilotflame.toml is not TOML" in message
    assert "line 1" in message


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "")
    (folder / "pilotflame.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"pilotflame\.toml is not TOML"):
        read_settings(folder)


def test_a_file_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "pilotflame.toml").mkdir()
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        read_settings(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere is not a folder"):
        read_settings(tmp_path / "nowhere")


def test_a_folder_without_a_usable_name_asks_for_one(tmp_path: Path) -> None:
    folder = tmp_path / "日本"
    folder.mkdir()
    with pytest.raises(SettingsError, match="name is ''"):
        read_settings(folder)
    assert read_settings(folder, overrides={"name": "nihon"}).name == "nihon"


def test_overrides_win_and_are_parsed_by_type(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 'threads = 2\nsnapshot = "w"\n[scale]\nmax = 2\nmin = 1\n[env]\nA = "a"\n')
    settings = read_settings(
        folder,
        overrides={
            "scale.max": "8",
            "idempotent": True,
            "threads": "",
            "snapshot": None,
            "hold_s": "1.5",
            "env.B": "8",
        },
    )
    assert (settings.scale.max, settings.scale.min) == (8, 1)
    assert (settings.idempotent, settings.threads, settings.snapshot) == (True, None, "w")
    assert settings.hold_s == 1.5
    assert settings.env == {"A": "a", "B": "8"}


def test_an_override_that_cannot_be_parsed_is_reported(tmp_path: Path) -> None:
    assert "scale.max is 'eight'; it should be a valid integer" in problem(
        tmp_path, "", {"scale.max": "eight"}
    )


def test_what_a_process_cannot_be_held_at_is_refused(tmp_path: Path) -> None:
    limits = '[resources]\nmemory_mb = 64\ncpus = 0.5\ntmp_mb = 4\nfiles = "private"\n'
    assert read_settings(folder_with(tmp_path, limits)).resources.tmp_mb == 4
    (tmp_path / "other").mkdir()
    text = problem(tmp_path / "other", '[resources]\nnetwork = "none"')
    assert "resources.network is 'none', but image.name is not set" in text
    # An image that is still to be built allows a network, although it has no name yet.
    (tmp_path / "unbuilt").mkdir()
    unbuilt = '[image]\nbase = "cuda"\n[resources]\nnetwork = "bridge"'
    assert read_settings(folder_with(tmp_path / "unbuilt", unbuilt)).image.unbuilt


def test_memory_of_gpus_needs_gpus(tmp_path: Path) -> None:
    limits = "[resources]\ngpus = 1\ngpu_memory_mb = 10240\n"
    assert read_settings(folder_with(tmp_path, limits)).resources.gpu_memory_mb == 10240
    (tmp_path / "other").mkdir()
    text = problem(tmp_path / "other", "[resources]\ngpu_memory_mb = 10240")
    assert "gpus must be at least 1" in text


def test_processes_with_private_files_need_local_weights(tmp_path: Path) -> None:
    remote = 'snapshot = "s3://bucket/net"\n'
    assert "cannot follow a fetch yet" in problem(tmp_path, f'{remote}[resources]\nfiles = "private"')
    (tmp_path / "other").mkdir()
    found = read_settings(folder_with(tmp_path / "other", f'{remote}[image]\nname = "a"'))
    assert found.snapshot_urls == {"": "s3://bucket/net"}
    (tmp_path / "third").mkdir()
    named = '[snapshots]\na = "weights"\nb = "s3://bucket/net"\n[resources]\nfiles = "private"\n'
    assert "cannot follow a fetch yet" in problem(tmp_path / "third", named)


def test_several_snapshots_have_names(tmp_path: Path) -> None:
    settings = read_settings(
        folder_with(tmp_path, '[snapshots]\nbase = "s3://bucket/base"\nstyle = "adapters/one"\n'),
        overrides={"snapshots.voice": "hf://org/voice@main", "snapshots.style": "adapters/two"},
    )
    assert list(settings.all_snapshots) == ["base", "style", "voice"]
    assert settings.snapshot_urls == {"base": "s3://bucket/base", "voice": "hf://org/voice@main"}
    assert settings.snapshot_paths(tmp_path) == {"style": (tmp_path / "adapters/two").resolve()}


def test_adapters_are_snapshots_of_another_table(tmp_path: Path) -> None:
    file = 'snapshot = "s3://bucket/base"\n[adapters]\nbase = "hf://org/one"\n'
    settings = read_settings(folder_with(tmp_path, file), overrides={"adapters.style": "lora"})
    assert list(settings.all_snapshots) == ["", "adapters.base", "adapters.style"]
    assert settings.snapshot_urls == {"": "s3://bucket/base", "adapters.base": "hf://org/one"}
    assert settings.snapshot_paths(tmp_path) == {"adapters.style": (tmp_path / "lora").resolve()}
    moved = settings.with_snapshots({"": "here", "adapters.style": "there"})
    assert moved.all_snapshots == {"": "here", "adapters.base": "hf://org/one", "adapters.style": "there"}
    assert settings.with_snapshots({}) == settings


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('snapshot = "w"\n[snapshots]\na = "v"', "snapshot and snapshots exclude each other"),
        ('[snapshots]\n"../a" = "v"', "snapshots.../a has no valid name"),
        ('[snapshots]\n"" = "v"', "snapshots. has no valid name"),
        ('[snapshots]\na = "v"\nA = "w"', "snapshots has two names that differ only in capital letters"),
        ('[snapshots]\na = " "\nb = "v"', "snapshots.a is ' '; allowed: the path"),
        ("[snapshots]\na = 1", "snapshots.a is of type int; it should be text"),
        ("snapshots = 1", "it should be a table"),
        ('[snapshots]\na = "v"\n[snapshot_part]\ntensors = ["x"]', "snapshot_part cannot be used with [snapshots]"),
        ("[snapshots]\n" + "\n".join(f'a{n} = "v"' for n in range(33)), "snapshots is"),
        ('[adapters]\na = "v"', "adapters are set, but snapshot is not"),
        ('snapshot = "w"\n[adapters]\n"a.b" = "v"', "adapters.a.b has no valid name"),
        ('snapshot = "w"\n[adapters]\na = ""', "adapters.a is ''; allowed: the path"),
    ],
)  # fmt: skip
def test_snapshots_that_cannot_be_are_refused(tmp_path: Path, toml: str, named: str) -> None:
    assert named in problem(tmp_path, toml)


def test_prefixes_are_tables(tmp_path: Path) -> None:
    file = (
        'snapshot = "w"\n[prefixes.a]\nmessages = [{role = "system", content = "x"}]\ntools = "tools.json"\n'
        "[prefixes.b]\nchat_template_kwargs = {enable_thinking = false}\n"
    )
    read = read_settings(folder_with(tmp_path, file))
    assert list(read.prefixes) == ["a", "b"]
    assert read.prefixes["a"] == {
        "messages": [{"role": "system", "content": "x"}], "tools": "tools.json"
    }  # fmt: skip
    assert FunctionSettings.model_validate_json(read.model_dump_json()) == read
    replaced = read_settings(tmp_path / "sentiment", overrides={"prefixes": '{"c": {"messages": []}}'})
    assert replaced.prefixes == {"c": {"messages": []}}


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[prefixes.a]", "prefixes are set, but snapshot is not"),
        ('snapshot = "w"\nprefixes = 1', "it should be a table"),
        ('snapshot = "w"\n[prefixes]\na = 1', "prefixes.a is 1; it should be a table with messages"),
        ('snapshot = "w"\n[prefixes."a b"]', "prefixes.a b has no valid name"),
        ('snapshot = "w"\n[prefixes.a]\ntool = []', "prefixes.a.tool is not a setting; did you mean prefixes.a.tools?"),
        ('snapshot = "w"\n[prefixes.a]\ntools = "../t.json"', "prefixes.a.tools is '../t.json'"),
        ('snapshot = "w"\n[prefixes.a]\ntools = "/t.json"', "prefixes.a.tools is '/t.json'"),
        ('snapshot = "w"\n[image]\nname = "x"\n[prefixes.a]', "prefixes cannot be used with image.name"),
        ('snapshot = "w"\n[image]\nbase = "x"\n[prefixes.a]', "prefixes cannot be used with image.name"),
        (
            'snapshot = "w"\n[resources]\nfiles = "private"\ntmp_mb = 5\n[prefixes.a]',
            "prefixes cannot be used with resources.tmp_mb",
        ),
        ('snapshot = "w"\n' + "".join(f"[prefixes.a{n}]\n" for n in range(33)), "prefixes is"),
    ],
)  # fmt: skip
def test_prefixes_that_cannot_be_are_refused(tmp_path: Path, toml: str, named: str) -> None:
    assert named in problem(tmp_path, toml)


def test_an_override_hides_no_broken_section(tmp_path: Path) -> None:
    assert "scale is 3" in problem(tmp_path, "scale = 3", {"scale.max": "8"})


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


_seconds = st.floats(min_value=0.001, max_value=1e6)
_valid = st.builds(
    FunctionSettings,
    name=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True).filter(
        lambda name: name not in ("models", "health", "repository")
    ),
    snapshot=st.none()
    | st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1).filter(str.strip),
    idempotent=st.booleans(),
    concurrency=st.integers(1, 1024),
    threads=st.none() | st.integers(1, 1024),
    timeout_s=_seconds,
    hold_s=_seconds,
    max_queue=st.integers(1, 1000),
    max_jobs=st.integers(1, 10**6),
    max_body_bytes=st.integers(1, 2**40),
    env=st.dictionaries(
        st.from_regex(r"[A-OQ-Z_][A-Z0-9_]{0,9}", fullmatch=True),
        st.text(st.characters(exclude_characters="\0", codec="utf-8")),
        max_size=3,
    ),
    source=st.lists(
        st.builds(
            SqsSource,
            type=st.just("sqs"),
            queue=st.just("https://sqs.eu-west-1.amazonaws.com/1/orders"),
            concurrency=st.none() | st.integers(1, 100),
            result=st.sampled_from([None, "s3://bucket/prefix", "sqs://answers"]),
        ),
        max_size=2,
    ).map(tuple),
    after=st.lists(st.sampled_from(["transcribe-first", "translate-first"]), max_size=16).map(tuple),
    schedule=st.lists(
        st.builds(
            Schedule,
            cron=st.sampled_from(["0 8 * * mon-fri", "*/5 * * * *"]),
            timezone=st.sampled_from(["UTC", "Europe/Berlin"]),
            workers=st.integers(1, 8),
            for_s=_seconds,
        ),
        max_size=2,
    ).map(tuple),
    resources=st.builds(
        Resources,
        memory_mb=st.none() | st.integers(16, 4096),
        cpus=st.none() | st.floats(min_value=0.01, max_value=64),
        tmp_mb=st.none() | st.integers(1, 4096),
        files=st.sampled_from(["shared", "private"]),
    ),
    scale=st.builds(
        Scale,
        min=st.integers(0, 8),
        max=st.integers(8, 64),
        buffer=st.integers(0, 8),
        idle_timeout_s=st.none() | _seconds,
        rest=st.sampled_from(["zygote", "local"]),
    ),
    aliases=st.lists(st.sampled_from(["prod", "1a", "_"])).map(tuple),
    cors=st.builds(
        Cors,
        origins=st.lists(st.sampled_from(["*", "https://shop.example", "http://[::1]:3000"])).map(tuple),
    ),
)


@hypothesis_settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(wanted=_valid)
def test_any_settings_survive_the_command_line(tmp_path: Path, wanted: FunctionSettings) -> None:
    flat: dict[str, Any] = {}
    for key, value in wanted.model_dump().items():
        flat |= (
            {f"{key}.{name}": of for name, of in value.items()} if isinstance(value, dict) else {key: value}
        )
    assert read_settings(tmp_path, overrides={key: _text(value) for key, value in flat.items()}) == wanted


@given(wanted=_valid)
def test_any_settings_survive_json(wanted: FunctionSettings) -> None:
    assert FunctionSettings.model_validate_json(wanted.model_dump_json()) == wanted


@given(st.text())
def test_a_slug_is_a_name_or_empty(text: str) -> None:
    name = slug(text)
    if name and name not in ("models", "health", "repository"):
        assert check_name(name) == name


def test_a_name_is_refused_with_a_remedy() -> None:
    with pytest.raises(SettingsError, match=r"The function's name is '\.\./x'.*Choose another name"):
        check_name("../x")


def test_units_are_finite() -> None:
    with pytest.raises(ValidationError):
        FunctionSettings(name="a", timeout_s=math.inf)


@pytest.mark.parametrize("wrong", ["shop.example", "https://shop.example/", "https://shop.example/path", "ftp://x", "*.example"])  # fmt: skip
def test_what_is_no_origin_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "pilotflame.toml").write_text(f'name = "f"\n[cors]\norigins = ["{wrong}"]\n')
    with pytest.raises(SettingsError, match="no origin"):
        read_settings(tmp_path)


@pytest.mark.parametrize("wrong", ["7", "a b", "", "$LATEST", "x" * 129])
def test_what_is_no_alias_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "pilotflame.toml").write_text(f'name = "f"\naliases = ["prod", "{wrong}"]\n')
    with pytest.raises(SettingsError, match="no alias"):
        read_settings(tmp_path)


def test_origins_come_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "pilotflame.toml").write_text('name = "f"\n[cors]\norigins = ["*", "https://shop.example"]\n')
    assert read_settings(tmp_path).cors.origins == ("*", "https://shop.example")
    # The value as a user writes it after --set.
    found = read_settings(tmp_path, overrides={"cors.origins": "https://a.example,http://localhost:3000"})
    assert found.cors.origins == ("https://a.example", "http://localhost:3000")


# -- where settings come from


def test_where_each_setting_comes_from(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "hold_s = 1\ntimeout_s = 2\n[scale]\nmax = 3\n[env]\nA = 'x'\n")
    overrides = {"timeout_s": "5", "scale.min": "1", "env.B": "y", "threads": None}
    read_settings(folder, overrides=overrides)
    assert setting_origins(folder, overrides=overrides) == {
        "hold_s": "pilotflame.toml", "scale.max": "pilotflame.toml", "env.A": "pilotflame.toml",
        "name": "the folder's name", "timeout_s": "--set", "scale.min": "--set", "env.B": "--set",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["docker-archive:/path", "oci:/path", "../containers/json?all=1&x=", "a b", "-a", "a/../b"]
)
def test_what_is_no_image_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"image\.name is"):
        read_settings(tmp_path, overrides={"name": "f", "image.name": name})


@pytest.mark.parametrize(
    "name", ["python:3.11", "registry.example:5000/team/f@sha256:" + "0" * 64, "sha256:" + "0" * 64, "f"]
)
def test_names_and_ids_of_images_are_accepted(tmp_path: Path, name: str) -> None:
    assert read_settings(tmp_path, overrides={"name": "f", "image.name": name}).image.name == name


def test_a_tilde_before_a_name_that_is_no_user_belongs_to_the_path(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, overrides={"name": "f", "snapshot": "~nosuchuser/x"})
    assert settings.snapshot_paths(tmp_path) == {"": tmp_path.resolve() / "~nosuchuser/x"}


@pytest.mark.parametrize("count", [100, 5000])
def test_the_first_problems_are_described(tmp_path: Path, count: int) -> None:
    said = problem(tmp_path, "\n".join(f"q{number} = 1" for number in range(count)))
    assert len(said) < 30_000
    assert (
        "q0 is not a setting; there are name" in said if count == 100 else f"{count} fields are wrong" in said
    )
    assert "q20" not in said


def test_the_first_unknown_overrides_are_described(tmp_path: Path) -> None:
    said = problem(tmp_path, "", {f"q{number}" * 1000: "1" for number in range(1000)})
    assert len(said) < 30_000
    assert "q0q0" in said
