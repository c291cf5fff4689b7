"""Reads the settings of the gateway from environment variables `PILOTFLAME_*` and command-line options."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from .validation import ENV_PREFIX, PositiveSeconds, Seconds, unknown_key, validate

_MIB = 1024 * 1024


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default state folder, which is `pilotflame` in the user's XDG state folder."""
    return _xdg(environ, "XDG_STATE_HOME", ".local/state") / "pilotflame"


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    base = Path(environ.get(variable, ""))
    # The XDG specification requires that a relative path is ignored.
    return base if base.is_absolute() else Path(environ.get("HOME") or Path.home()) / below_home


class GatewaySettings(BaseModel, frozen=True, extra="forbid"):
    """The settings of one gateway process. Each can be set by the environment variable PILOTFLAME_<KEY>."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8600, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    state_dir: Path = Field(default_factory=default_state_dir, description="Folder of everything deployed.")
    cache_dir: Path = Field(
        default_factory=lambda: _xdg(os.environ, "XDG_CACHE_HOME", ".cache") / "pilotflame" / "snapshots",
        description="Folder of the node's cache of fetched snapshots.",
    )
    auth: Literal["auto", "always"] = Field(
        "auto",
        description="Whether callers need an API key: auto, if other machines can reach the gateway or a key was made;"
        " or always.",
    )
    keep_result_s: PositiveSeconds = Field(1800.0, description="Seconds for which a job's result is kept.")
    webhook_networks: tuple[str, ...] = Field(
        (), description="Private networks that webhooks may call, as 10.0.0.0/8,fd00::/8; by default none."
    )
    drain_s: Seconds = Field(30.0, description="Seconds that started invocations get at shutdown.")
    max_body_bytes: int = Field(20 * _MIB, ge=1, description="Largest request body of any function.")
    body_timeout_s: PositiveSeconds = Field(30.0, description="Seconds a request's body may take.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least important messages that the gateway prints and stores."
    )
    log_format: Literal["text", "json"] = Field("text", description="How the gateway prints messages.")
    log_max_bytes: int = Field(
        32 * _MIB, ge=64 << 10, description="Size of one log on disk, a function's or the gateway's."
    )
    log_keep_s: PositiveSeconds = Field(14 * 86400.0, description="Seconds for which logs are kept on disk.")
    access_log: bool = Field(False, description="Whether each request is logged.")
    header_timeout_s: PositiveSeconds = Field(10.0, description="Seconds a request's header may take.")

    @field_validator("webhook_networks", mode="before")
    @classmethod
    def _split(cls, networks: Any) -> Any:
        """Split a text, which is the value of an environment variable, at commas and blanks."""
        return tuple(networks.replace(",", " ").split()) if isinstance(networks, str) else networks

    @field_validator("state_dir", "cache_dir")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


def read_gateway_settings(
    environ: Mapping[str, str], *, other_variables: Collection[str] = (), **overrides: Any
) -> GatewaySettings:
    """Return the gateway's settings. Raise SettingsError, which names all problems.

    A setting has the value of its override, else of its variable PILOTFLAME_<KEY> in `environ`, else its
    default. An override of None does not count. Unknown variables PILOTFLAME_* are problems, except for the
    names in `other_variables`, which have another purpose.
    """
    known = {ENV_PREFIX + key.upper(): key for key in GatewaySettings.model_fields}
    found = {name for name in environ if name.startswith(ENV_PREFIX)}.difference(other_variables)
    problems = [unknown_key(name, known) for name in sorted(found - known.keys())]
    raw: dict[str, Any] = {"state_dir": default_state_dir(environ)}
    raw |= {known[name]: environ[name] for name in found & known.keys()}
    raw |= {key: value for key, value in overrides.items() if value is not None}
    remedy = f"Correct the {ENV_PREFIX}* variables or the options."
    return validate(GatewaySettings, raw, problems, "The gateway's settings", remedy)
