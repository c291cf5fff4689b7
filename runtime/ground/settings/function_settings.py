"""Reads the settings of a function from `pilotflame.toml` and from overrides.

Overrides are options of the command line or fields of a deploy request. An unknown key is an error, because
an option that silently has no effect would be worse.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, Field, Strict, TypeAdapter, model_validator
from pydantic.fields import FieldInfo

from ....addresses import INPUT_NETWORKS, UPLOAD_URL
from ....errors import SettingsError
from ....handlers.dialect import parse_reference
from ....handlers.recognise import installed_dialects
from ....snapshot.handle import ADAPTERS, is_adapter, subject_of
from ....snapshot.sources.locate import is_remote
from .alerts import Alerts
from .event_source import AnySource
from .request_log import RequestLog
from .resources import Resources
from .schedule import Schedule
from .validation import (
    ENV_PREFIX,
    MOST_PROBLEMS,
    Origin,
    PositiveSeconds,
    Seconds,
    checked,
    keys,
    read_toml,
    split_text,
    unknown_key,
    validate,
)

SETTINGS_FILE = "pilotflame.toml"
# The origin of a setting that comes from an override.
FROM_OVERRIDE = "--set"
FROM_FOLDER = "the folder's name"
# First segments of the gateway's own HTTP paths. Requests to a function with such a name would not reach it.
RESERVED_NAMES = frozenset({"models", "health", "repository", "trace", "logging"})

# Tables in which the keys are any names.
_OPEN_TABLES = frozenset({"adapters", "env", "snapshots"})
_MIB = 1024 * 1024
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ALIAS = re.compile(r"(?![0-9]+$)[A-Za-z0-9_-]{1,128}")
_PREFIX_KEY = re.compile(r"prefixes\.[A-Za-z0-9_-]{1,64}")
PREFIX_FIELDS = ("messages", "tools", "chat_template_kwargs")
_SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
# A reference to an app, as ASGI servers take it: a module, and a name in the module.
_APP = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,511}")
# The name of a Debian package, optionally with an architecture and a version.
_APT_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+)?")


def name_problem(name: str) -> str | None:
    """Return why `name` cannot be a function's name, which is a part of URLs and paths on disk. None if it can."""
    if not _NAME.fullmatch(name):
        return f"name is {name!r}; allowed: 1 to 63 of a-z, 0-9 and -, neither first nor last a -"
    if name in RESERVED_NAMES:
        return f"name is {name!r}, which is reserved (reserved: {', '.join(sorted(RESERVED_NAMES))})"
    return None


FunctionName = Annotated[str, checked(name_problem)]


def check_name(name: str) -> str:
    """Return `name` unchanged. Raise SettingsError if it cannot be a function's name."""
    if problem := name_problem(name):
        raise SettingsError(f"The function's {problem}.", remedy="Choose another name.")
    return name


def _alias_problem(alias: str) -> str | None:
    if _ALIAS.fullmatch(alias):
        return None
    return f"{alias[:80]!r} is no alias; allowed: 1 to 128 of a-z, A-Z, 0-9, - and _, not only digits"


Alias = Annotated[str, checked(_alias_problem)]


class Scale(BaseModel, frozen=True, extra="forbid", strict=True):
    """How many workers a function has, and what the node keeps while it has none."""

    min: int = Field(0, ge=0, le=1024, description="Workers kept even without requests.")
    max: int = Field(4, ge=1, le=1024, description="Workers at most.")
    buffer: int = Field(0, ge=0, le=1024, description="Idle workers kept above what the load needs.")
    idle_timeout_s: Seconds | None = Field(
        None,
        description="Seconds without a request before a worker ends; by default the keep-alive policy learns when.",
    )
    park_after_s: Seconds | None = Field(
        None,
        description="Seconds without a request before a worker is parked: its weights give the memory of their devices"
        " back, and the next request brings them back; by default never.",
    )
    slow_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The share of requests that may wait for the start of a worker, as 0.01; the price of waiting then"
        " follows from it. By default, the gateway's price_waiting_s holds.",
    )
    rest: Literal["zygote", "local"] = Field(
        "zygote",
        description="Kept at zero: a zygote (imports and skeleton) and one forked child, or only the files.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for key, value in (("min", self.min), ("buffer", self.buffer)):
            if value > self.max:
                raise ValueError(f"scale.{key} is {value}, more than scale.max, which is {self.max}")
        if self.slow_share is not None and self.idle_timeout_s is not None:
            raise ValueError("scale.slow_share and scale.idle_timeout_s exclude each other")
        return self


def _package_problem(package: str) -> str | None:
    if _APT_PACKAGE.fullmatch(package):
        return None
    return f"image.packages has {package[:80]!r}; allowed: a Debian package, as ffmpeg or libgl1=1.6.0-1"


AptPackage = Annotated[str, checked(_package_problem)]


def _image_problem(name: str | None) -> str | None:
    # Refuse a name that the engine would read as a path of its API, or as a transport, such as docker-archive:/path.
    if name is None or (_IMAGE.fullmatch(name) and ".." not in name and ":/" not in name):
        return None
    return f"image.name is {name[:80]!r}; allowed: the name of an image, as registry.example/team/name:1, or its id"


class Image(BaseModel, frozen=True, extra="forbid", strict=True):
    """The container image that a function runs in. Without a name, it runs in processes of the gateway's machine."""

    name: Annotated[str | None, checked(_image_problem)] = Field(
        None,
        description="Image with pilotflame and the function's requirements, as `pilotflame build` makes it.",
    )
    base: str | None = Field(
        None,
        pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]{0,511}$",
        description='For `pilotflame build`: the image that it starts from, which has Python; "cuda" for NVIDIA\'s;'
        " by default Debian's slim one with the Python of this machine.",
    )
    packages: Annotated[tuple[AptPackage, ...], Strict(False), BeforeValidator(split_text)] = Field(
        (), max_length=200, description="For `pilotflame build`: system packages, installed with apt-get."
    )

    @property
    def unbuilt(self) -> bool:
        """True if the settings describe how the image is built, but do not name the built image."""
        return self.name is None and (self.base is not None or bool(self.packages))


def _handler_problem(handler: str) -> str | None:
    _, file, callable_name = parse_reference(handler)
    path = PurePosixPath(file)
    plain = str(path) == file and not path.is_absolute() and ".." not in path.parts and file.isprintable()
    if not plain or path.suffix != ".py":
        file, _, name = handler.rpartition(".")
        as_ours = (
            f", here {file.replace('.', '/')}.py:{name}"
            if name.isidentifier() and file.replace(".", "").isidentifier()
            else ""
        )
        return f'handler is {handler!r}; allowed: a .py file in the folder, as "handler.py"{as_ours}'
    if handler.endswith(":") or (callable_name and not callable_name.isidentifier()):
        return f'handler is {handler!r}; after the colon there must be a Python name, as "handler.py:predict"'
    return None


def setting_of(snapshot: str) -> str:
    """Return the key of the setting that names a snapshot. The key of the unnamed snapshot, "", is `snapshot`."""
    return subject_of(snapshot) or "snapshot"


def _snapshot_problem(snapshot: str | None, key: str = "snapshot") -> str | None:
    if snapshot is None or (snapshot.strip() and "\0" not in snapshot):
        return None
    return f"{key} is {snapshot!r}; allowed: the path of a folder or of a .safetensors file, or a URL"


def _snapshots_problem(snapshots: dict[str, str], table: str = "snapshots") -> str | None:
    for name in snapshots:
        if not _SNAPSHOT_NAME.fullmatch(name):
            return f"{table}.{name[:80]} has no valid name; allowed: 1 to 63 of a-z, A-Z, 0-9, _ and -, first a letter or digit"
    if len({name.lower() for name in snapshots}) < len(snapshots):
        return f"{table} has two names that differ only in capital letters, which some file systems do not tell apart"
    found = (_snapshot_problem(where, f"{table}.{name}") for name, where in snapshots.items())
    return "; ".join(filter(None, found)) or None


def _adapters_problem(adapters: dict[str, str]) -> str | None:
    return _snapshots_problem(adapters, "adapters")


def _prefixes_problem(prefixes: dict[str, Any]) -> str | None:
    return next(
        filter(None, (_prefix_problem(f"prefixes.{name}", one) for name, one in prefixes.items())), None
    )


def _prefix_problem(key: str, prefix: Any) -> str | None:
    """Return what is wrong with the name or the keys of a prefix. `build` checks their values, with the model's chat template."""
    if not _PREFIX_KEY.fullmatch(key):
        return f"{key[:80]} has no valid name; allowed: 1 to 64 of a-z, A-Z, 0-9, _ and -"
    if not isinstance(prefix, dict):
        return f"{key} is {prefix!r:.80}; it should be a table with messages"
    if unknown := sorted(prefix.keys() - PREFIX_FIELDS):
        return unknown_key(f"{key}.{unknown[0]}", [f"{key}.{field}" for field in PREFIX_FIELDS])
    tools = prefix.get("tools", [])
    if isinstance(tools, str) and (PurePosixPath(tools).is_absolute() or ".." in PurePosixPath(tools).parts):
        return f"{key}.tools is {tools!r:.80}; allowed: tools, or a JSON file in the folder, as tools.json"
    return None


def _env_problem(env: dict[str, str]) -> str | None:
    return "; ".join(filter(None, (_variable_problem(*item) for item in env.items())))


def _variable_problem(name: str, value: str) -> str | None:
    # No message shows the value of the variable, which may be a secret.
    if not _VARIABLE.fullmatch(name):
        return f"env.{name} is not a variable's name; allowed: letters, digits and _, no digit first"
    if name.upper().startswith(ENV_PREFIX) and name not in (INPUT_NETWORKS, UPLOAD_URL):
        return f"env.{name} begins with {ENV_PREFIX}, which is reserved"
    return f"env.{name} contains a NUL character" if "\0" in value else None


def _host_problem(host: str) -> str | None:
    if _HOST.fullmatch(host) and len(host) <= 253:
        return None
    return f"hosts has {host[:80]!r}; allowed: a host name in small letters and without a port, as api.example.com"


HostName = Annotated[str, checked(_host_problem)]

TensorPattern = Annotated[str, Field(min_length=1, max_length=1024)]
# JSON holds no number of more than 64 bits.
SliceSpec = tuple[
    Annotated[int, Field(ge=-64, le=63)],
    Annotated[int, Field(ge=0, le=65_535)],
    Annotated[int, Field(ge=1, le=65_536)],
]


class Cors(BaseModel, frozen=True, extra="forbid", strict=True):
    """Which web pages of other origins may call the function from a browser."""

    origins: Annotated[tuple[Origin, ...], Strict(False), BeforeValidator(split_text)] = Field(
        (),
        max_length=100,
        description='Origins of the pages, as https://shop.example; "*" for all; by default none.',
    )


class Budget(BaseModel, frozen=True, extra="forbid", strict=True):
    """The most that a function may use in a day, which begins at 0:00 UTC. Without limits, the function may use as much
    as it needs.
    """

    money_per_day: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Money a day, at the gateway's prices; then no worker starts until the next day.",
    )
    seconds_per_day: float | None = Field(
        None, gt=0, le=1e9, description="Seconds of workers a day; then no worker starts until the next day."
    )


class ResponseCaching(BaseModel, frozen=True, extra="forbid", strict=True):
    """Whether the gateway stores answers, with which it answers equal calls of the same API key."""

    ttl_s: PositiveSeconds | None = Field(
        None,
        description="Seconds for which an answer is stored. Set it only if equal calls may get the same answer; by default"
        " no answer is stored.",
    )


class SnapshotPart(BaseModel, frozen=True, extra="forbid", strict=True):
    """The part of its snapshot that the function needs. The rest is not fetched. Without this table, the function needs
    the whole snapshot.
    """

    tensors: Annotated[tuple[TensorPattern, ...], Strict(False)] = Field(
        (),
        max_length=64,
        description="Names of tensors, in which * stands for any characters; by default all.",
    )
    slices: Annotated[dict[TensorPattern, Annotated[SliceSpec, Strict(False)]], Field(max_length=64)] = Field(
        {},
        description="For such names, [dimension, rank, number of ranks]: the rank needs that one of as many equal"
        " slices, as in tensor parallelism. The first name that fits counts.",
    )


class FunctionSettings(BaseModel, frozen=True, extra="forbid", strict=True):
    """All settings of a function; part of its immutable revision."""

    name: FunctionName = Field(description="Its name in URLs; by default made from the folder's name.")
    handler: Annotated[str, checked(_handler_problem)] = Field(
        "handler.py",
        description='The handler\'s file inside the folder, optionally with ":callable" after it, and before it the dialect and'
        ' a colon if the platform is not recognised, as in "runpod:handler.py".',
    )
    snapshot: Annotated[str | None, checked(_snapshot_problem)] = Field(
        None,
        description="The weights: a folder or .safetensors file, absolute or relative to the function's folder; or a"
        " remote snapshot, s3://, gs:// or az://bucket/prefix, hf://org/repo@revision, oci://registry/repository:tag,"
        " mlflow://MODEL/VERSION or http(s)://host/prefix: a"
        " prefix, or one .safetensors file. A manifest beside the weights is not needed: the first fetch makes it.",
    )
    snapshots: Annotated[dict[str, str], Field(max_length=32), checked(_snapshots_problem)] = Field(
        {},
        description="Instead of snapshot, several by name, such as a base and an adapter: NAME = what snapshot may be."
        ' The handler finds them in context.snapshots["NAME"]. Each is fetched and kept for itself.',
    )
    adapters: Annotated[dict[str, str], Field(max_length=256), checked(_adapters_problem)] = Field(
        {},
        description="Small snapshots beside the others, such as LoRA adapters: NAME = what snapshot may be. Each is fetched when"
        " a request first needs it. The handler finds them in context.adapters.",
    )
    prefixes: Annotated[dict[str, Any], Field(max_length=32), checked(_prefixes_problem)] = Field(
        {},
        description="Beginnings of prompts of a language model, tables [prefixes.NAME] with messages, tools (or the name of their JSON"
        " file) and chat_template_kwargs. The first worker computes their keys and values, and later workers map them.",
    )
    snapshot_part: SnapshotPart = Field(
        default_factory=SnapshotPart, description="What the function needs of its snapshot."
    )
    wait_for_weights: bool = Field(
        False,
        description="Whether a worker waits for all its weights before `setup` and calls, as extensions need that read"
        " them without torch's dispatcher; by default each torch operation waits for its own.",
    )
    idempotent: bool = Field(
        False, description="Whether a call whose worker died may run again, as jobs do: see attempts."
    )
    concurrency: int = Field(1, ge=1, le=1024, description="Invocations one worker runs at the same time.")
    threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of a torch operation; by default a share of the processors."
    )
    timeout_s: PositiveSeconds = Field(600.0, description="Seconds one invocation may take.")
    execution_timeout_s: PositiveSeconds | None = Field(
        None,
        description="Seconds one call of the handler may take; then its caller gets an error. If the call goes on for 5 s, its"
        " worker is replaced.",
    )
    hold_s: Seconds = Field(60.0, description="Seconds a request waits for a worker to be ready.")
    build_timeout_s: PositiveSeconds = Field(
        600.0, description="Seconds the import of the handler and its `build` may take together."
    )
    start_timeout_s: PositiveSeconds = Field(
        900.0,
        description="Seconds a worker may start without printing a line or reading a byte; with progress, four times as long.",
    )
    ttl_s: PositiveSeconds = Field(86_400.0, description="Seconds a job may wait in the queue.")
    attempts: int = Field(3, ge=1, le=100, description="Attempts of a job whose workers die or cannot start.")
    max_queue: int = Field(1000, ge=1, le=1_000_000, description="Most waiting invocations.")
    max_jobs: int = Field(100_000, ge=1, le=100_000_000, description="Most jobs in the queue.")
    max_body_bytes: int = Field(20 * _MIB, ge=1, description="Largest request body.")
    env: Annotated[dict[str, str], checked(_env_problem)] = Field({}, description="The workers' environment.")
    scale: Scale = Field(default_factory=Scale, description="How many workers there are.")
    image: Image = Field(default_factory=Image, description="The container that it runs in, if any.")
    resources: Resources = Field(default_factory=Resources, description="What its workers may use.")
    budget: Budget = Field(default_factory=Budget, description="What it may use in a day.")
    response_cache: ResponseCaching = Field(
        default_factory=ResponseCaching,
        description="Which answers equal calls get from the gateway's memory.",
    )
    request_log: RequestLog = Field(
        default_factory=RequestLog,
        description="Which inputs and outputs are written to a store, and measured.",
    )
    alerts: Alerts = Field(
        default_factory=Alerts, description="Conditions whose beginning and end a webhook reports."
    )
    aliases: Annotated[tuple[Alias, ...], Strict(False), BeforeValidator(split_text)] = Field(
        (),
        max_length=100,
        description="Qualifiers by which callers of AWS Lambda may name the live revision, as prod.",
    )
    cors: Cors = Field(default_factory=Cors, description="Which web pages of other origins may call it.")
    hosts: Annotated[tuple[HostName, ...], Strict(False), BeforeValidator(split_text)] = Field(
        (),
        max_length=16,
        description="More host names whose requests all go to the function's web app, as api.example.com. The gateway's app_hosts"
        " must allow them.",
    )
    source: Annotated[tuple[AnySource, ...], Strict(False)] = Field(
        (), max_length=100, description="Queues whose messages are run as jobs: tables, [[source]]."
    )
    after: Annotated[tuple[FunctionName, ...], Strict(False), BeforeValidator(split_text)] = Field(
        (),
        max_length=16,
        description="Functions after which this one is called: their calls start a worker of it.",
    )
    schedule: Annotated[tuple[Schedule, ...], Strict(False)] = Field(
        (),
        max_length=100,
        description="Times at which workers are started ahead of need: tables, [[schedule]].",
    )

    @model_validator(mode="after")
    def _part_of_a_snapshot(self) -> Self:
        if self.snapshot is not None and self.snapshots:
            raise ValueError(
                "snapshot and snapshots exclude each other; name all of them in [snapshots], or remove it"
            )
        if self.snapshots and (self.snapshot_part.tensors or self.snapshot_part.slices):
            raise ValueError(
                "snapshot_part cannot be used with [snapshots]; remove it, or use one snapshot: snapshot = …"
            )
        if self.adapters and not (self.snapshot or self.snapshots):
            raise ValueError("adapters are set, but snapshot is not; set snapshot, or remove [adapters]")
        if self.prefixes and not (self.snapshot or self.snapshots):
            raise ValueError("prefixes are set, but snapshot is not; set snapshot, or remove [prefixes]")
        if self.snapshot is None and (self.snapshot_part.tensors or self.snapshot_part.slices):
            raise ValueError(
                "snapshot_part is set, but snapshot is not; set snapshot, or remove snapshot_part"
            )
        return self

    @model_validator(mode="after")
    def _weights_of_confined(self) -> Self:
        if self.snapshot_urls and self.image.name is None and self.resources.files == "private":
            raise ValueError(
                'with resources.files = "private", a snapshot must be a folder or a file: such workers cannot follow'
                " a fetch yet; those in a container (image.name) can"
            )
        return self

    @model_validator(mode="after")
    def _disk_of_prefixes(self) -> Self:
        limited = self.resources.files == "private" and self.resources.tmp_mb is not None
        if self.prefixes and (self.image.name is not None or self.image.unbuilt or limited):
            limit = "resources.tmp_mb" if limited else "image.name"
            raise ValueError(
                f"prefixes cannot be used with {limit}, because nothing would limit what workers write in the folder of the stored prefixes; make"
                " them with `pilotflame snapshot prefixes`, and name the folder in [snapshots]"
            )
        return self

    @model_validator(mode="after")
    def _others_before(self) -> Self:
        if self.name in self.after:
            raise ValueError(
                f"after has {self.name!r}, which is this function; name the functions that call before it"
            )
        return self

    @model_validator(mode="after")
    def _workers_of_schedules(self) -> Self:
        most = max((schedule.workers for schedule in self.schedule), default=0)
        if most > self.scale.max:
            raise ValueError(f"schedule.workers is {most}, more than scale.max, which is {self.scale.max}")
        return self

    @model_validator(mode="after")
    def _network_of_process(self) -> Self:
        in_process = self.image.name is None and not self.image.unbuilt
        if in_process and self.resources.network is not None:
            raise ValueError(
                f"resources.network is {self.resources.network!r}, but image.name is not set: a process has the"
                " network of its gateway"
            )
        return self

    @property
    def all_snapshots(self) -> dict[str, str]:
        """All snapshots in the settings, by name.

        The snapshot in the setting `snapshot` has the name "". The names of adapters begin with `ADAPTERS`.
        """
        first = self.snapshots if self.snapshot is None else {"": self.snapshot}
        return first | {f"{ADAPTERS}{name}": where for name, where in self.adapters.items()}

    @property
    def packages(self) -> dict[str, str]:
        """The optional packages that the gateway needs for the function, by the setting that needs them."""
        sources = {f"A [[source]] of type {one.type!r}": one.package for one in self.source if one.package}
        return sources | self.request_log.packages

    def with_snapshots(self, places: Mapping[str, str]) -> Self:
        """Return the settings with other places of some snapshots. `places` maps their names, as in `all_snapshots`, to the new places."""
        update: dict[str, Any] = {"snapshot": places[""]} if "" in places else {}
        if named := {name: place for name, place in places.items() if name and not is_adapter(name)}:
            update["snapshots"] = self.snapshots | named
        if adapters := {name: place for name, place in places.items() if is_adapter(name)}:
            plain = {name.removeprefix(ADAPTERS): place for name, place in adapters.items()}
            update["adapters"] = self.adapters | plain
        return self.model_copy(update=update)

    @property
    def snapshot_urls(self) -> dict[str, str]:
        """The URLs of the remote snapshots, by name."""
        return {name: where for name, where in self.all_snapshots.items() if is_remote(where)}

    def snapshot_paths(self, folder: Path) -> dict[str, Path]:
        """Return the paths of the snapshots on this node, by name. `folder` is the function's folder."""
        return {
            name: (folder / _expanded(where)).resolve()
            for name, where in self.all_snapshots.items()
            if not is_remote(where)
        }


def _expanded(where: str) -> Path:
    """Return a path with ~ replaced. A ~ before a name that is no user stays: it is part of the name."""
    try:
        return Path(where).expanduser()
    except RuntimeError:
        return Path(where)


def read_settings(
    folder: Path, *, overrides: Mapping[str, Any] | None = None, place: str = "", standalone: bool = False,
    folder_name: str | None = None,
) -> FunctionSettings:  # fmt: skip
    """Return the settings of the function in `folder`. Raise SettingsError, which names all problems.

    If `place` is given, errors call the folder by this text. Without the setting `name`, the function is named after the folder.
    `folder_name` is the folder's name if `folder` is an unpacked copy. A `standalone` function is in a container that a
    platform has started and scales: [image] and [resources] do not count, and at least one worker always runs.

    `overrides` have dotted keys, as in `{"scale.max": "8", "env.MODE": "x"}`, and take precedence over the
    file. A text is converted to the type of its key. An empty text sets an optional key to None. A key whose
    value is None is not overridden.
    """
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    raw = read_toml(folder / SETTINGS_FILE, missing_ok=True)
    problems = list(islice(_apply(raw, overrides or {}), MOST_PROBLEMS))
    _lengthen(raw, problems)
    named_after = folder.resolve().name if folder_name is None else folder_name
    if not raw.setdefault("name", slug(named_after)) and folder_name is not None:
        raise _unnamed(place or str(folder))
    if standalone:
        raw.pop("image", None)
        raw.pop("resources", None)
    try:
        settings = validate(FunctionSettings, raw, problems, f"The settings of {place or folder}", "")
    except SettingsError as error:
        origins = setting_origins(folder, overrides=overrides)
        places = {origins.get(problem.split()[0], SETTINGS_FILE) for problem in error.details["problems"]}
        error.remedy = f"Correct {' and '.join(sorted(places))}."
        raise
    if standalone and not settings.scale.min:
        scale = settings.scale.model_copy(update={"min": 1})
        settings = settings.model_copy(update={"scale": scale})
    return settings


def _unnamed(place: str) -> SettingsError:
    remedy = f"Set `name` in {SETTINGS_FILE}, or send set=name=NAME or folder=NAME with the upload."
    message = f"{place[:1].upper()}{place[1:]} has no name."
    return SettingsError(message, remedy=remedy, details={"problems": ["name is missing"]})


def setting_origins(folder: Path, *, overrides: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the origin of each setting of the function in `folder`, by the setting's key. Settings with their defaults
    are left out.

    `read_settings` must have accepted the same arguments.
    """
    found = dict.fromkeys(_flat(read_toml(folder / SETTINGS_FILE, missing_ok=True)), SETTINGS_FILE)
    found.setdefault("name", FROM_FOLDER)
    found |= {key: FROM_OVERRIDE for key, value in (overrides or {}).items() if value is not None}
    short = installed_dialects().short_keys if found.keys() - keys(FunctionSettings).keys() else {}
    return {"handler" if key in short else key: origin for key, origin in found.items()}


def _flat(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a table and of the tables in it."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def slug(text: str) -> str:
    """Return a function's name made from `text`, or "" if no character of `text` can be used."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text.lower()).strip("-")[:63].rstrip("-")


def _lengthen(raw: dict[str, Any], problems: list[str]) -> None:
    """Replace a dialect's short key in `raw` by `handler`. Add a problem for each key whose value cannot be used."""
    for key in raw.keys() - FunctionSettings.model_fields.keys():
        if (dialect := installed_dialects().short_keys.get(key)) is None:
            continue
        found = _APP.fullmatch(value) if isinstance(value := raw.pop(key), str) else None
        if found is None:
            problems.append(
                f'{key} is {value!r:.80}; it should be a module and a name in it, as "shop.main:app"'
            )
        elif "handler" in raw:
            problems.append(f"handler and {key} exclude each other; remove one of them")
        else:
            raw["handler"] = f"{dialect}:{found[1].replace('.', '/')}.py:{found[2]}"


def _apply(raw: dict[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Put the overrides into `raw`, the settings of the file. Yield one problem per unknown key."""
    known = keys(FunctionSettings, lists=False)
    for key, value in overrides.items():
        if value is None:
            continue
        if key not in known and key in installed_dialects().short_keys:
            raw.pop("handler", None)
            raw[key] = value
            continue
        section, dot, rest = key.partition(".")
        if key not in known and not (section in _OPEN_TABLES and rest):
            yield unknown_key(key, known)
            continue
        table = raw.setdefault(section, {}) if dot else raw
        # If the file has another value where a table should be, the validation that follows reports it.
        if isinstance(table, dict):
            table[rest if dot else key] = _parsed(known[key], value) if key in known else value


def _parsed(field: FieldInfo, value: Any) -> Any:
    """Return the value of an override, converted to the type of `field` if it is a text.

    A text that cannot be converted is returned unchanged. The validation that follows reports it.
    """
    if not isinstance(value, str):
        return value
    if not value and NoneType in get_args(field.annotation):
        return None
    from_text: Callable[[str], Any] = TypeAdapter(field.annotation or Any).validate_strings
    # The text of a list of tables is JSON, as in: --set source='[{"type": "sqs", ...}]'
    for parse in (from_text, json.loads):
        with contextlib.suppress(ValueError):
            return parse(value)
    return value
