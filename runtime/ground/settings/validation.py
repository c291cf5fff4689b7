"""Validates settings, and describes each problem with its key. For a misspelt key it suggests a similar one.

Settings are pydantic models, which may hold tables and lists of tables. Keys are dotted, as in `scale.max`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ....errors import SettingsError
from ....foreign_json import first_errors
from ....snapshot.format.signature import SIGNER
from .event_source import EventSource, source_kinds
from .removed import REMOVED

MAX_TOML_BYTES = 64 << 10
MOST_PROBLEMS = 20
"""At most this number of problems is described. A file of 64 KiB may have 13,000, and each text may list all settings."""
MAX_KEY_CHARS = 80
LISTED = "; there are "
ENV_PREFIX = "PILOTFLAME_"
"""The first part of the name of every environment variable that is a setting."""
YEAR_S = 365 * 24 * 3600
"""One year in seconds, the longest time to which a setting can be set."""
Seconds = Annotated[float, Field(ge=0, le=YEAR_S, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=YEAR_S, allow_inf_nan=False)]

ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")

PEER_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}")

_M = TypeVar("_M", bound=BaseModel)
# What the value should be, by the type of pydantic's error. pydantic's own message for these errors names a type of
# Python, but a reader of pilotflame.toml needs a type of TOML.
_EXPECTED = {"dict_type": "a table", "model_type": "a table", "tuple_type": "a list of tables"}


def checked(problem_of: Callable[[Any], str | None]) -> AfterValidator:
    """Return a validator for a field. It raises ValueError if `problem_of(value)` returns a problem."""

    def check(value: Any) -> Any:
        if problem := problem_of(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _origin_problem(origin: str) -> str | None:
    if origin == "*" or ORIGIN.fullmatch(origin):
        return None
    return f'{origin[:80]!r} is no origin; allowed: "*", or as browsers send it, https://shop.example or http://localhost:3000'


Origin = Annotated[str, checked(_origin_problem)]
"""The origin of web pages, or "*" for all."""


def _peer_problem(url: str) -> str | None:
    if PEER_URL.fullmatch(url):
        return None
    return f"{url[:80]!r} is not the address of a gateway's peers_port; write it as http://NAME:PORT, without a path"


PeerUrl = Annotated[str, checked(_peer_problem)]
"""The URL at which a gateway serves chunks of snapshots to other gateways."""


GPU = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]{0,63}):([1-9][0-9]{0,7})", re.ASCII)


def _gpu_problem(text: str) -> str | None:
    if GPU.fullmatch(text):
        return None
    return f"{text[:80]!r} is no GPU; write its id, as `pilotflame doctor` has it, and its MiB: 0:81920 or MIG-4f1c...:20096"


GpuText = Annotated[str, checked(_gpu_problem)]
"""A GPU of the node, or a slice of one, and its memory."""


def _network_problem(network: str) -> str | None:
    try:
        ip_network(network)
    except ValueError as error:
        return f"{error}; write it as 10.1.0.0/16, fd00::/8 or 127.0.0.1"
    return None


NetworkText = Annotated[str, checked(_network_problem)]
"""A network of IP addresses."""


def _signer_problem(key: str) -> str | None:
    if SIGNER.fullmatch(key):
        return None
    return f"snapshot_signers has {key[:80]!r}, which is no public key; write it as `pilotflame snapshot sign` prints it: ed25519:…"


SignerText = Annotated[str, checked(_signer_problem)]
"""The public key of a signer of snapshots."""


_PLUGIN_ADDRESS = re.compile(r"[a-z][a-z0-9_]*=(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
_HOST_PATTERN = re.compile(r"(\*\.)?[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})+")


def _host_pattern_problem(pattern: str) -> str | None:
    if _HOST_PATTERN.fullmatch(pattern):
        return None
    return f"{pattern[:80]!r} is no host name; write it as api.example.com or *.apps.example.com"


def _plugin_address_problem(text: str) -> str | None:
    found = _PLUGIN_ADDRESS.fullmatch(text)
    if found and 0 < int(found[1]) < 65536:
        return None
    return f"{text[:80]!r} is no plugin and address; write it as oip=127.0.0.1:8001"


PluginAddress = Annotated[str, checked(_plugin_address_problem)]
"""A plugin and the address at which it listens, as NAME=HOST:PORT."""
HostPattern = Annotated[str, checked(_host_pattern_problem)]
"""A host name, or with "*." in front all names below it."""


def split_text(value: Any) -> Any:
    """Return a text split at commas and blanks, as a tuple. Return any other value unchanged."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def read_toml(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the content of a TOML file; with `missing_ok`, an empty table if it does not exist.

    Raise SettingsError if it cannot be read.
    """
    try:
        # The parser takes time in proportion to the square of the length.
        if path.stat().st_size > MAX_TOML_BYTES:
            message = f"{path} has more than {MAX_TOML_BYTES >> 10} KiB."
            raise SettingsError(message, remedy="Put data into a file of its own.")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if missing_ok and isinstance(error, FileNotFoundError):
            return {}
        message = f"{path} cannot be read: {error.strerror}."
        raise SettingsError(message, remedy="Check the path, and make it readable.") from error
    # TOMLDecodeError and UnicodeDecodeError are both ValueErrors.
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}.", remedy="Correct that line.") from error


def validate(model: type[_M], raw: dict[str, Any], problems: list[str], subject: str, remedy: str) -> _M:
    """Return `raw`, a table of settings, as a `model`.

    Raise SettingsError, which names all problems, if `raw` is not valid or if `problems` is not empty.
    """
    try:
        settings = model.model_validate(raw)
    except ValidationError as error:
        known = keys(model)
        found = first_errors(error, MOST_PROBLEMS, values=True)
        problems = problems + [
            details["msg"] if details["type"] == "too_many_errors" else _problem(details, known)
            for details in found
        ]
    else:
        if not problems:
            return settings
    # Only the first problems list all settings.
    rest = (problem.partition(LISTED)[0] for problem in problems[3:MOST_PROBLEMS])
    problems = [*problems[:3], *rest]
    sentences = (text if text.endswith(("?", ".")) else f"{text}." for text in dict.fromkeys(problems))
    message = f"{subject} are invalid: {' '.join(sentences)}"
    raise SettingsError(message, remedy=remedy, details={"problems": problems})


def keys(model: type[BaseModel], prefix: str = "", *, lists: bool = True) -> dict[str, FieldInfo]:
    """Return the fields of `model` that hold values, by their dotted keys. Each key begins with `prefix`.

    A list of tables is one such field. With `lists`, also return the keys of the tables in the list, as `source.queue`.
    """
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        tables, is_list = _tables(field), get_origin(field.annotation) is tuple
        if not tables or is_list:
            found[prefix + name] = field
        if lists or not is_list:
            for table in tables:
                found |= keys(table, f"{prefix}{name}.", lists=lists)
    return found


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return a sentence which says that `key` is not a setting, and suggests the most similar of the `known` keys."""
    names, key = list(known), key[:MAX_KEY_CHARS]
    if key.removeprefix(ENV_PREFIX).lower() in REMOVED:
        return f"{key} no longer exists; remove it. A fixed value has replaced it."
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    last = key.rpartition(".")[2]
    near = [by_last[last]] if last in by_last else difflib.get_close_matches(key, names, n=1)
    near = near or [by_last[match] for match in difflib.get_close_matches(last, by_last, n=1)]
    tables = {name.partition(".")[0] for name in names if "." in name}
    if key in tables:
        within = [name for name in names if name.startswith(f"{key}.")]
        return f"{key} is a table; set one of {', '.join(within)}."
    near = ([] if "." in key else difflib.get_close_matches(key, tables, n=1, cutoff=0.75)) or near
    hint = f"; did you mean {near[0]}?" if near else f"{LISTED}{', '.join(names)}."
    return f"{key} is not a setting{hint}"


def _problem(details: ErrorDetails, known: dict[str, FieldInfo]) -> str:
    """Return a sentence for one validation error of pydantic. `known` has all keys, as `keys` returns them."""
    loc = [part for part in details["loc"] if part != "[key]"]
    if loc[:1] == ["source"]:
        # After the index of a table comes its type.
        del loc[2:3]
    key = ".".join(map(str, loc))[:MAX_KEY_CHARS]
    # `key` without the indices of lists: all tables of a list have the same keys.
    plain = ".".join(part for part in loc if isinstance(part, str))
    kind, value = details["type"], repr(details["input"])
    if kind == "extra_forbidden":
        return unknown_key(plain, known)
    if kind == "union_tag_invalid":
        return f"{key}.type is {details['ctx']['tag']!r}; it should be {details['ctx']['expected_tags']}"
    if kind in ("missing", "union_tag_not_found"):
        key = key if kind == "missing" else f"{key}.type"
        return f"{key} is missing"
    if kind == "value_error":
        # The message of a validator from `checked`, or of a model's own validator, already names the key.
        return str(details["ctx"]["error"])
    if plain not in known and key.partition(".")[0] in known:
        # An entry of the table `env`. Its value is not shown, since it may be a secret.
        return f"{key} is of type {type(details['input']).__name__}; it should be text"
    expected = f"should be {_EXPECTED[kind]}" if kind in _EXPECTED else details["msg"].removeprefix("Input ")
    return f"{key} is {value if len(value) <= 80 else f'{value[:77]}...'}; it {expected}"


def _tables(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the model of a nested table, or of the tables in a list. If the tables have several kinds, return the
    model of each kind.
    """
    kinds = [field.annotation, *get_args(field.annotation)]
    kinds += [part for kind in kinds for part in get_args(kind)]
    found = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    if found is None:
        return []
    return [*source_kinds().values()] if issubclass(found, EventSource) else [found]
