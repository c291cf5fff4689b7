"""Reads the settings of the gateway from options, environment variables `PILOTFLAME_*` and a TOML file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from ....errors import SettingsError
from .validation import (
    ENV_PREFIX,
    MOST_PROBLEMS,
    GpuText,
    HostPattern,
    NetworkText,
    Origin,
    PeerUrl,
    PluginAddress,
    PositiveSeconds,
    Seconds,
    SignerText,
    read_toml,
    split_text,
    unknown_key,
    validate,
)

_MIB = 1024 * 1024
MIN_TOKEN_CHARS = 16


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default state folder, which is `pilotflame` in the user's XDG state folder. Raise SettingsError if the
    user has no home.
    """
    if (base := _xdg(environ, "XDG_STATE_HOME", ".local/state")) is None:
        message = f"User {os.getuid()} has no home directory, so there is no default state folder."
        raise SettingsError(message, remedy="Set HOME or PILOTFLAME_STATE_DIR, or XDG_STATE_HOME.")
    return base / "pilotflame"


def _default_cache_dir(settings: Mapping[str, Any]) -> Path:
    base = _xdg(os.environ, "XDG_CACHE_HOME", ".cache")
    return base / "pilotflame" / "snapshots" if base is not None else settings["state_dir"] / "snapshots"


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    """Return an XDG folder of the user. Return None if the user has no home, for example without an entry in /etc/passwd."""
    base = Path(environ.get(variable, ""))
    # The XDG specification requires that a relative path is ignored.
    if base.is_absolute():
        return base
    try:
        return Path(environ.get("HOME") or Path.home()) / below_home
    except RuntimeError:
        return None


class GatewaySettings(BaseModel, frozen=True, extra="forbid"):
    """The settings of one gateway process. Each can be set by the environment variable PILOTFLAME_<KEY>.

    If the default of a setting depends on the machine, `shown_default` is the default that documents show.
    """

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        8600,
        ge=0,
        le=65535,
        description="Port to listen on; 0 takes a free one. For `serve`, a platform's $PORT or $AIP_HTTP_PORT replaces the default.",
    )
    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="Folder of everything deployed.",
        json_schema_extra={"shown_default": "~/.local/state/pilotflame"},
    )
    database: SecretStr | None = Field(
        None,
        description="PostgreSQL database, as postgresql://user:password@host/name. Gateways with the same one share functions, jobs, keys and"
        " secrets; by default files of state_dir.",
    )
    store_grace_s: PositiveSeconds = Field(
        600.0,
        description="Seconds for which API keys are accepted after the last reading of them from `database`; then 503.",
    )
    cache_dir: Path = Field(
        default_factory=_default_cache_dir,
        description="Folder of the node's cache of fetched snapshots. It does not follow state_dir, unless the user has no home:"
        " all gateways of a user share it.",
        json_schema_extra={"shown_default": "~/.cache/pilotflame/snapshots"},
    )
    cache_memory_mb: int | None = Field(
        None,
        ge=0,
        description="MiB of snapshots that the node's cache holds in memory; 0: none. By default a quarter of the memory.",
    )
    cache_disk_mb: int | None = Field(
        None,
        ge=0,
        description="MiB of snapshots that the node's cache holds on the disk. By default four fifths of what is free.",
    )
    peers: tuple[PeerUrl, ...] = Field(
        (),
        description="URLs at which all gateways of the cluster serve chunks of snapshots to each other, as"
        " http://pilotflame-peers:8601; names may have several addresses; by default none.",
    )
    peers_port: int = Field(
        8601,
        ge=0,
        le=65535,
        description="Port on which this gateway serves chunks, on `host`, if `peers` is set.",
    )
    peers_token: SecretStr | None = Field(
        None,
        description="Secret that all gateways of the cluster share, of at least 16 characters; for `peers`.",
    )
    tls_cert: Path | None = Field(
        None,
        description="File with the certificate chain, in PEM, with which the gateway serves HTTPS; read again when it changes.",
    )
    tls_key: Path | None = Field(None, description="File with the private key of tls_cert, in PEM.")
    engine: str | None = Field(
        None,
        pattern=r"^(unix|tcp|http|https)://.",
        description="URL of docker's or podman's socket; found if not set.",
    )
    auth: Literal["auto", "always"] = Field(
        "auto",
        description="Whether callers need an API key: auto, if other machines can reach the gateway or a key was made;"
        " or always.",
    )
    keep_result_s: PositiveSeconds = Field(1800.0, description="Seconds for which a job's result is kept.")
    keep_revisions: int = Field(
        5, ge=1, le=1000, description="Revisions of a function that are kept, the live one in any case."
    )
    webhook_networks: tuple[str, ...] = Field(
        (), description="Private networks that webhooks may call, as 10.0.0.0/8,fd00::/8; by default none."
    )
    snapshot_networks: tuple[NetworkText, ...] = Field(
        (),
        description="Private networks from which functions of keys that are not trusted may fetch snapshots; by default none.",
    )
    snapshot_identity: tuple[str, ...] = Field(
        (),
        description="URLs of snapshots that such functions may fetch with the gateway's credentials, as s3://models/*; by"
        " default none.",
    )
    snapshot_signers: tuple[SignerText, ...] = Field(
        (),
        description="Public keys as ed25519:…, which `pilotflame snapshot sign` prints. Every snapshot of a function must be"
        " signed by one of them; by default none needs a signature.",
    )
    queue_networks: tuple[NetworkText, ...] = Field(
        (),
        description="Private networks in which the event sources of such functions, and places for their results, may be; by"
        " default none.",
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins of web pages that may call all functions, as https://shop.example; by default none.",
    )
    app_hosts: tuple[HostPattern, ...] = Field(
        (),
        description="Host names of functions beside NAME.localhost: *.apps.example.com gives each function NAME.apps.example.com;"
        " others are for its setting hosts. Never list the gateway's own name: its callers would send their keys to a function.",
    )
    trusted_proxies: tuple[NetworkText, ...] = Field(
        (),
        description="Networks of proxies in front, whose Forwarded, X-Forwarded-Proto, -Host and -For say the address that links"
        " in responses begin with, and the client's; by default none.",
    )
    max_stored_bytes: int | None = Field(
        None,
        ge=1,
        description="Most bytes of jobs' inputs and results in the state folder, which API keys share; by default half of the"
        " space that is free at the start.",
    )
    drain_s: Seconds = Field(
        30.0,
        description="Seconds that started invocations get at shutdown, and for which calls wait for the place of a replaced revision.",
    )
    lame_duck_s: Seconds | None = Field(
        None,
        description="Seconds after SIGTERM for which new requests are still served, before the shutdown begins, while"
        " /readyz answers 503: balancers learn late. By default 3 if other machines can reach the gateway, else 0.",
    )
    rest_mb: int | None = Field(
        None,
        ge=0,
        description="MiB of memory that functions without workers may hold together; then those that"
        " are missed least keep no zygote. By default an eighth of the memory.",
    )
    response_cache_mb: int = Field(
        64,
        ge=0,
        le=1 << 20,
        description="MiB of memory for answers of functions with [response_cache], which API keys share; 0: none is stored.",
    )
    max_workers: int | None = Field(
        None,
        ge=1,
        description="Workers of all functions together at most; by default each function's scale.max only.",
    )
    policy_kind: Literal["trusted", "container"] = Field(
        "trusted",
        description="Code that may be deployed: trusted, also as processes, which have all rights of the gateway's user; or only"
        " in containers. API keys may allow less.",
    )
    policy_networks: tuple[Literal["none", "bridge", "host"], ...] = Field(
        ("none", "bridge", "host"), description="Networks that containers may use."
    )
    policy_images: tuple[str, ...] = Field(
        ("*",), description="Images of containers that may be used; * stands for any characters."
    )
    policy_snapshots: tuple[str, ...] = Field(
        ("*",),
        description="URLs and absolute paths of snapshots outside the code that may be used; * stands for any characters.",
    )
    policy_queues: tuple[str, ...] = Field(
        ("*",),
        description="Addresses of queues and of places for results, and profiles of the gateway, that may be used; * stands for"
        " any characters.",
    )
    policy_gpus: int | None = Field(
        None, ge=0, le=64, description="GPUs of each worker at most; by default all."
    )
    policy_memory_mb: int | None = Field(
        None,
        ge=16,
        description="MiB of memory of a function's workers at most; by default all. If it is set, functions must set"
        " resources.memory_mb.",
    )
    policy_cpus: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Processors of a function's workers at most; by default all. If it is set, functions must set resources.cpus.",
    )
    gpus: tuple[GpuText, ...] | None = Field(
        None,
        description="GPUs, or MIG slices of them, that functions with resources.gpus share, with their MiB, as 0:81920,1:81920."
        " By default those that NVML or amdsmi finds.",
    )
    currency: str = Field(
        "USD",
        pattern=r"^[^\s\x00-\x1f]{1,8}$",
        description="Currency of the prices, as usage shows it. Nothing is converted.",
    )
    price_memory_gb_hour: float = Field(
        0.0108,
        ge=0,
        allow_inf_nan=False,
        description="Money for a GB of memory held for an hour; weighed against waiting. A GB of disk costs a hundredth of it.",
    )
    price_device_hour: float = Field(
        2.88, ge=0, allow_inf_nan=False, description="Money for a whole GPU held for an hour."
    )
    price_waiting_s: float = Field(
        0.001,
        ge=0,
        allow_inf_nan=False,
        description="What a second is worth for which one caller waits for a worker, in money.",
    )
    plugins: tuple[str, ...] | None = Field(
        None,
        description="The plugins that are on, as runpod,cog: dialects, their routes, event sources. By default all that are installed.",
    )
    plugin_ports: tuple[PluginAddress, ...] = Field(
        (),
        description="Addresses at which plugins serve other protocols than HTTP, as oip=127.0.0.1:8001 for gRPC; by default none.",
    )
    bare_paths: bool | None = Field(
        None,
        description="Whether plugins also answer without the base of their paths, as /predictions beside /cog/predictions."
        " By default only for a function that is served alone (serve FOLDER, images).",
    )
    # The gateway can send a worker at most MAX_PAYLOAD_BYTES at once (link/frames.py).
    max_body_bytes: int = Field(
        20 * _MIB, ge=1, le=255 * _MIB, description="Largest request body of any function."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least important messages that the gateway prints and stores."
    )
    log_format: Literal["text", "json", "collector"] = Field(
        "text",
        description="How messages are printed; collector: as json, and all other logs on standard output.",
    )
    log_keep_s: PositiveSeconds = Field(14 * 86400.0, description="Seconds for which logs are kept on disk.")
    access_log: bool = Field(
        False,
        description="Whether each request is logged: in logs/access.jsonl, and printed if log_format is collector.",
    )

    @field_validator(
        "webhook_networks",
        "snapshot_networks",
        "snapshot_identity",
        "snapshot_signers",
        "queue_networks",
        "cors_origins",
        "app_hosts",
        "trusted_proxies",
        "peers",
        "gpus",
        "plugins",
        "plugin_ports",
        "policy_networks",
        "policy_images",
        "policy_snapshots",
        "policy_queues",
        mode="before",
    )
    @classmethod
    def _split(cls, values: Any) -> Any:
        """Split a text, which is the value of an environment variable."""
        return split_text(values)

    @field_validator("state_dir", "cache_dir", "tls_cert", "tls_key")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @field_validator("gpus")
    @classmethod
    def _different(cls, gpus: tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = [text.partition(":")[0] for text in gpus or ()]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"gpus has {repeated[0]!r} twice; write each GPU once, with all of its memory")
        return gpus

    @field_validator("peers_token", mode="before")
    @classmethod
    def _long_enough(cls, token: Any) -> Any:
        """Refuse a short token, with a message that does not show it."""
        text = token.get_secret_value() if isinstance(token, SecretStr) else token
        if text is None:
            return None
        # Files of secrets often end with a line end.
        text = text.strip() if isinstance(text, str) else ""
        if len(text) < MIN_TOKEN_CHARS or not all(" " <= char <= "~" for char in text):
            fault = f"peers_token is not a text of at least {MIN_TOKEN_CHARS} printable ASCII characters"
            raise ValueError(fault)
        return text

    @model_validator(mode="after")
    def _peers_with_what_they_need(self) -> Self:
        schemes = {url.partition("://")[0] for url in self.peers}
        if self.peers and self.peers_token is None:
            raise ValueError(
                "peers is set, but peers_token is not; all gateways of the cluster need the same one"
            )
        if len(schemes) > 1:
            raise ValueError("peers has http:// and https:// URLs; gateways speak one of them to each other")
        if schemes == {"https"} and self.tls_cert is None:
            raise ValueError("peers has https:// URLs, but tls_cert is not set; chunks are served with it")
        return self

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise ValueError(f"{one} is set, but {other} is not; HTTPS needs both")
        return self


def read_gateway_settings(
    environ: Mapping[str, str], *, config: Path | None = None, other_variables: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}), **overrides: Any,
) -> GatewaySettings:  # fmt: skip
    """Return the gateway's settings. Raise SettingsError, which names all problems.

    The value of a setting comes from the first of these places that has it: the overrides, the variable
    PILOTFLAME_<KEY> in `environ`, the TOML file `config`, `defaults`, the setting's default. An override of None does
    not count. Unknown keys and unknown variables PILOTFLAME_* are problems, except for the names in `other_variables`,
    which have another purpose.
    """
    known = {ENV_PREFIX + key.upper(): key for key in GatewaySettings.model_fields}
    found = {name for name in environ if name.startswith(ENV_PREFIX)}.difference(other_variables)
    problems = [unknown_key(name, known) for name in sorted(found - known.keys())[:MOST_PROBLEMS]]
    raw: dict[str, Any] = dict(defaults)
    if config is not None:
        raw |= _read_config(config)
    raw |= {known[name]: environ[name] for name in found & known.keys()}
    raw |= {key: value for key, value in overrides.items() if value is not None}
    if "state_dir" not in raw:
        raw["state_dir"] = default_state_dir(environ)
    places = f"{config}, " if config is not None else ""
    remedy = f"Correct {places}the {ENV_PREFIX}* variables or the options."
    return validate(GatewaySettings, raw, problems, "The gateway's settings", remedy)


def _read_config(file: Path) -> dict[str, Any]:
    """Return the settings in a file. A relative path in the file is relative to the file's folder."""
    raw = read_toml(file)
    for key, field in GatewaySettings.model_fields.items():
        if field.annotation in (Path, Path | None) and isinstance(raw.get(key), str):
            raw[key] = file.absolute().parent / Path(raw[key]).expanduser()
    return raw
