"""Settings of a function: the file `pilotflame.toml`, and overrides from the command line or a deploy request.

They are read once into a frozen object. All problems are reported together, by key, each with the nearest valid key
where one was misspelt: an option that silently has no effect is worse than an error.
"""

from __future__ import annotations

import json
import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from ...addresses import INPUT_NETWORKS
from ...errors import SettingsError
from ...handlers.dialects import recognise
from ...snapshot.sources.locate import is_remote
from . import wording
from .event_source import EventSource
from .wording import ENV_PREFIX, YEAR_S, validate

SETTINGS_FILE = "pilotflame.toml"
# Path segments of our own on the HTTP surface; a function of that name could not be reached.
RESERVED_NAMES = frozenset({"models", "health", "repository"})

_MIB = 1024 * 1024
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def name_problem(name: str) -> str | None:
    """Why `name` cannot be a function's name, or None. The one rule, for settings, paths and URLs alike."""
    if not _NAME.fullmatch(name):
        return f"name is {name!r}; allowed: 1 to 63 of a-z, 0-9 and -, neither first nor last a -"
    if name in RESERVED_NAMES:
        return f"name is {name!r}, which is reserved (reserved: {', '.join(sorted(RESERVED_NAMES))})"
    return None


def check_name(name: str) -> str:
    """The name itself, or a SettingsError."""
    if problem := name_problem(name):
        raise SettingsError(f"The function's {problem}.", remedy="Choose another name.")
    return name


class Scale(BaseModel):
    """How many workers there are, and what stays when there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min: int = Field(0, ge=0, le=1024, description="Workers kept even without requests.")
    max: int = Field(4, ge=1, le=1024, description="Workers at most.")
    buffer: int = Field(0, ge=0, le=1024, description="Idle workers kept above what the load needs.")
    idle_timeout_s: float = Field(
        60.0,
        ge=0,
        le=YEAR_S,
        allow_inf_nan=False,
        description="Seconds without a request before a worker ends.",
    )
    rest: Literal["zygote", "local"] = Field(
        "zygote", description="What stays at zero: a zygote (imports and skeleton), or only the files."
    )
    standby: bool = Field(True, description="Keep one forked child waiting beside the zygote.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for key, value in (("min", self.min), ("buffer", self.buffer)):
            if value > self.max:
                raise ValueError(f"scale.{key} is {value}, more than scale.max, which is {self.max}")
        return self


class FunctionSettings(BaseModel):
    """Everything a function may say about itself; part of its immutable revision."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(description="The function's name in URLs; by default made from the folder's name.")
    handler: str = Field(
        "handler.py",
        description='The handler\'s file inside the folder, optionally ":callable" after it; "runpod:", "cog:" or'
        ' "lambda:" before it where it is not recognised as such.',
    )
    snapshot: str | None = Field(
        None,
        description="The weights: a folder or .safetensors file, absolute or below the function's folder; or where a"
        " snapshot lies elsewhere, s3://bucket/prefix or http(s)://host/prefix.",
    )
    idempotent: bool = Field(False, description="Whether an invocation whose worker died may run again.")
    concurrency: int = Field(1, ge=1, le=1024, description="Invocations one worker runs at the same time.")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads of one torch operation; by default shared out by pilotflame.",
    )
    timeout_s: float = Field(
        600.0, gt=0, le=YEAR_S, allow_inf_nan=False, description="Seconds one invocation may take."
    )
    execution_timeout_s: float | None = Field(
        None,
        gt=0,
        le=YEAR_S,
        allow_inf_nan=False,
        description="Seconds one call of the handler may take; then its worker is replaced.",
    )
    hold_s: float = Field(
        60.0,
        ge=0,
        le=YEAR_S,
        allow_inf_nan=False,
        description="Seconds a request waits for a worker to be ready.",
    )
    ttl_s: float = Field(
        86_400.0, gt=0, le=YEAR_S, allow_inf_nan=False, description="Seconds a job may wait in the queue."
    )
    attempts: int = Field(
        3,
        ge=1,
        le=100,
        description="How often a job is given to a worker, if workers die of it or cannot start.",
    )
    max_queue: int = Field(
        1000, ge=1, le=1_000_000, description="Waiting invocations before new ones are refused."
    )
    max_jobs: int = Field(
        100_000, ge=1, le=100_000_000, description="Jobs in the queue before new ones are refused."
    )
    max_jobs_bytes: int = Field(
        4096 * _MIB, ge=1, description="Bytes of input of the jobs in the queue before new ones are refused."
    )
    max_body_bytes: int = Field(20 * _MIB, ge=1, description="Largest request body.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the workers.")
    scale: Scale = Field(default_factory=Scale, description="How many workers there are.")
    source: Annotated[tuple[EventSource, ...], Strict(False)] = Field(
        (), max_length=100, description="Queues whose messages are run as jobs: tables, [[source]]."
    )

    @property
    def handler_file(self) -> str:
        """The handler's file, relative to the function's folder."""
        return recognise.parse(self.handler).file

    @property
    def handler_callable(self) -> str:
        """The name of the callable in it."""
        return recognise.parse(self.handler).name or "handler"

    @property
    def snapshot_url(self) -> str | None:
        """Where the weights lie, if they are to be fetched."""
        return self.snapshot if self.snapshot is not None and is_remote(self.snapshot) else None

    def snapshot_path(self, folder: Path) -> Path | None:
        """Where the weights lie on this node, absolute, for a function whose folder is `folder`."""
        if self.snapshot is None or is_remote(self.snapshot):
            return None
        return (folder / Path(self.snapshot).expanduser()).resolve()

    @field_validator("name")
    @classmethod
    def _name_allowed(cls, name: str) -> str:
        if problem := name_problem(name):
            raise ValueError(problem)
        return name

    @field_validator("handler")
    @classmethod
    def _handler_inside(cls, handler: str) -> str:
        dialect, _, rest = handler.partition(":")
        file, colon, callable_name = (rest if dialect in recognise.DIALECTS else handler).partition(":")
        path = PurePosixPath(file)
        plain = str(path) == file and not path.is_absolute() and ".." not in path.parts and file.isprintable()
        if not plain or path.suffix != ".py":
            raise ValueError(
                f'handler is {handler!r}; allowed: a .py file inside the folder, as "handler.py"'
            )
        if colon and not callable_name.isidentifier():
            raise ValueError(
                f'handler is {handler!r}; after the colon comes a Python name, as "handler.py:predict"'
            )
        return handler

    @field_validator("snapshot")
    @classmethod
    def _snapshot_named(cls, snapshot: str | None) -> str | None:
        if snapshot is not None and (not snapshot.strip() or "\0" in snapshot):
            raise ValueError(
                f"snapshot is {snapshot!r}; allowed: the path of a folder or of a .safetensors file, or a URL"
            )
        return snapshot

    @field_validator("env")
    @classmethod
    def _env_allowed(cls, env: dict[str, str]) -> dict[str, str]:
        problems = [problem for name, value in env.items() if (problem := _variable_problem(name, value))]
        if problems:
            raise ValueError("; ".join(problems))
        return env


def _variable_problem(name: str, value: str) -> str | None:
    # The value may be a secret: messages never show it.
    if not _VARIABLE.fullmatch(name):
        return f"env.{name} is not a variable's name; allowed: letters, digits and _, no digit first"
    if name.upper().startswith(ENV_PREFIX) and name != INPUT_NETWORKS:
        return f"env.{name} begins with {ENV_PREFIX}, which is reserved"
    return f"env.{name} contains a NUL character" if "\0" in value else None


def read_settings(folder: Path, *, overrides: Mapping[str, Any] | None = None) -> FunctionSettings:
    """The settings of the function in `folder`.

    `overrides` are dotted keys (`{"scale.max": "8", "env.MODE": "x"}`) that win over the file. Text is parsed
    by the key's type, and empty text unsets a key that may be unset; None means not given.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    raw = _read_toml(folder / SETTINGS_FILE)
    problems = list(_apply(raw, overrides or {}))
    raw.setdefault("name", slug(folder.resolve().name))
    return validate(FunctionSettings, raw, problems, f"The settings of {folder}", f"Correct {SETTINGS_FILE}.")


def slug(text: str) -> str:
    """A function's name made from a folder's; may be empty where nothing in it can be used."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text.lower()).strip("-")[:63].rstrip("-")


class SettingRow(NamedTuple):
    """One line of the reference."""

    key: str
    type: str
    default: str
    description: str


def settings_reference(model: type[BaseModel] = FunctionSettings) -> list[SettingRow]:
    """Every setting with its type, default and meaning, in order, for the documentation and `--help`."""
    return [
        SettingRow(key, wording.allowed(field), wording.default_text(field), field.description or "")
        for key, field in (wording.leaves(model) | wording.entries(model)).items()
    ]


# Reading the sources


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}.", remedy="Make it a readable file."
        ) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError both are
        raise SettingsError(
            f"{path} is not TOML: {error}.", remedy="Correct that place in the file."
        ) from error


def _apply(raw: dict[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Put the overrides into the raw settings; yields what is wrong with their keys."""
    leaves = wording.leaves(FunctionSettings)
    for key, value in overrides.items():
        if value is None:
            continue
        section, dot, rest = key.partition(".")
        if key not in leaves and not (section == "env" and rest):
            yield wording.unknown(key, leaves)
            continue
        table = raw.setdefault(section, {}) if dot else raw
        if isinstance(table, dict):  # else the file's own mistake is reported, not hidden
            table[rest if dot else key] = _parsed(leaves[key], value) if key in leaves else value


def _parsed(field: FieldInfo, value: Any) -> Any:
    """The text of an override as its key's type; unparsable text stays, for validation to name it."""
    if not isinstance(value, str):
        return value
    if not value and NoneType in get_args(field.annotation):
        return None
    try:
        if wording.table(field):  # --set source='[{"type": "sqs", ...}]'
            return json.loads(value)
        adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or Any)
        return adapter.validate_strings(value)
    except ValueError:  # ValidationError is one
        return value
