"""Settings of the gateway: environment variables `PILOTFLAME_*` and options of the command line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from .wording import ENV_PREFIX, YEAR_S, validate

_MIB = 1024 * 1024


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Where the gateway keeps its state unless told: the XDG state folder of the user."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the XDG rules: a relative path is to be ignored
        base = Path(environ.get("HOME") or Path("~").expanduser()) / ".local" / "state"
    return base / "pilotflame"


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where fetched snapshots are kept unless told: the XDG cache folder of the user."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(environ.get("HOME") or Path("~").expanduser()) / ".cache"
    return base / "pilotflame" / "snapshots"


class GatewaySettings(BaseModel):
    """What one gateway process is told; each also as PILOTFLAME_<KEY> in its environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8600, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    state_dir: Path = Field(
        default_factory=lambda: default_state_dir(os.environ), description="Folder of everything deployed."
    )
    cache_dir: Path = Field(
        default_factory=lambda: default_cache_dir(os.environ),
        description="Folder of the node's cache of snapshots fetched from elsewhere.",
    )
    auth: Literal["auto", "always"] = Field(
        "auto",
        description="Whether callers need an API key: auto, if others than this machine can reach the gateway or a"
        " key was made; or always.",
    )
    keep_result_s: float = Field(
        1800.0, gt=0, le=YEAR_S, allow_inf_nan=False, description="Seconds for which a job's result is kept."
    )
    webhook_networks: tuple[str, ...] = Field(
        (), description="Private networks that webhooks may call, as 10.0.0.0/8,fd00::/8; by default none."
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=YEAR_S,
        allow_inf_nan=False,
        description="Seconds that started invocations get at shutdown.",
    )
    max_body_bytes: int = Field(20 * _MIB, ge=1, description="Largest request body of any function.")
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        le=YEAR_S,
        allow_inf_nan=False,
        description="Seconds a request's body may take to arrive.",
    )
    header_timeout_s: float = Field(
        10.0,
        gt=0,
        le=YEAR_S,
        allow_inf_nan=False,
        description="Seconds a request's header may take to arrive.",
    )

    @field_validator("webhook_networks", mode="before")
    @classmethod
    def _split(cls, networks: Any) -> Any:
        """The environment has text only: networks with commas between them."""
        if not isinstance(networks, str):
            return networks
        return tuple(network.strip() for network in networks.split(",") if network.strip())

    @field_validator("state_dir", "cache_dir")
    @classmethod
    def _absolute(cls, folder: Path, info: ValidationInfo) -> Path:
        return folder.expanduser().absolute()


def read_gateway_settings(
    environ: Mapping[str, str], *, other_variables: Collection[str] = (), **overrides: Any
) -> GatewaySettings:
    """The gateway's settings: keyword overrides (None: not given) before PILOTFLAME_* before the defaults.

    `other_variables` are full names of PILOTFLAME_* variables that mean something to somebody else.
    """
    given = {
        name: value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name not in other_variables
    }
    problems = [_unknown_variable(name) for name in sorted(given) if not _known_variable(name)]
    raw: dict[str, Any] = {"state_dir": default_state_dir(environ)}
    raw |= {_variable_key(name): value for name, value in given.items() if _known_variable(name)}
    raw |= {key: value for key, value in overrides.items() if value is not None}
    remedy = f"Correct the {ENV_PREFIX}* variables or the options."
    return validate(GatewaySettings, raw, problems, "The gateway's settings", remedy)


def _variable_key(name: str) -> str:
    return name.removeprefix(ENV_PREFIX).lower()


def _known_variable(name: str) -> bool:
    return _variable_key(name) in GatewaySettings.model_fields


def _unknown_variable(name: str) -> str:
    names = [ENV_PREFIX + key.upper() for key in GatewaySettings.model_fields]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"{name} is not a setting of the gateway; did you mean {near[0]}?"
