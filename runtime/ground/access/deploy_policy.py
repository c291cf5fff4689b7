"""Defines what may be deployed: the policy of the gateway, and the policy of the API key that deploys.

There are two kinds of code. Trusted code runs as a process of the gateway's user and can read and change all that the
gateway can. Code in a container cannot do this. Only the container prevents it. So a policy with the kind `container`
refuses every function without an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, Field, Strict, model_validator

from ....addresses import Addresses
from ....errors import PolicyViolation
from ....snapshot.sources.access import ANY, Access
from ..settings.function_settings import FunctionSettings, setting_of
from ..settings.validation import split_text

Kind = Literal["trusted", "container"]
Network = Literal["none", "bridge", "host"]
Pattern = Annotated[str, Field(min_length=1, max_length=1024)]
Patterns = Annotated[tuple[Pattern, ...], Strict(False), BeforeValidator(split_text), Field(max_length=100)]
Networks = Annotated[tuple[Network, ...], Strict(False), BeforeValidator(split_text)]
# The largest `resources.tmp_mb` of a function whose code is not trusted. A container keeps its temporary files in memory.
MAX_TMP_MB = 4096
_STEP_UP = re.compile(r"(^|[/\\])\.\.([/\\?#;]|$)")
_CONTROL = re.compile(r"[\x00-\x20\x7f]")


class DeployPolicy(BaseModel, frozen=True, extra="forbid", strict=True):
    """The limits of deploys. The defaults of the fields are for code that is not trusted. For trusted code, everything
    is allowed by default.
    """

    kind: Kind = Field(
        "container",
        description="container: only code that runs in a container. trusted: also code that runs as a process, with"
        " all rights of the gateway's user.",
    )
    networks: Networks = Field(("none",), description="Networks that containers may use.")
    images: Patterns = Field(("*",), description="Images of containers; * stands for any characters.")
    snapshots: Patterns = Field(
        (), description="URLs and absolute paths of snapshots outside the code; * stands for any characters."
    )
    queues: Patterns = Field(
        (),
        description="Addresses of queues and of places for results, and profiles of the gateway; * stands for any characters.",
    )
    gpus: int | None = Field(None, ge=0, le=64, description="GPUs of each worker at most; null: all.")
    memory_mb: int | None = Field(
        None,
        ge=16,
        description="MiB of memory of a function's workers at most; null: all. If it is set, functions must set resources.memory_mb.",
    )
    cpus: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Processors of a function's workers at most, in the same way.",
    )

    @model_validator(mode="before")
    @classmethod
    def _trusting(cls, given: Any) -> Any:
        """Let a policy for trusted code allow everything that it does not mention."""
        if isinstance(given, dict) and given.get("kind") == "trusted":
            return {"networks": get_args(Network), "snapshots": ("*",), "queues": ("*",)} | given
        return given

    def faults(self, settings: FunctionSettings, outside: Mapping[str, str]) -> Iterator[str]:
        """Yield a text for each setting of a function that the policy does not allow.

        `outside` has the URL or absolute path of each snapshot outside the function's code, by the snapshot's name.
        """
        if self.kind == "container" and settings.image.name is None:
            yield "code must run in a container, but image.name is not set"
        yield from self._container_faults(settings)
        for name, where in outside.items():
            if not _matches(where, self.snapshots):
                # The URL is not shown: it may hold credentials.
                yield f"{setting_of(name)} is outside the code; allowed: {_listed(self.snapshots)}"
        for source in settings.source:
            for key, address in source.addresses.items():
                if not _matches(address, self.queues):
                    yield f"source.{key} is {address!r}; allowed: {_listed(self.queues)}"
        if (store := settings.request_log.store) is not None:
            if store.startswith("/") and self.kind == "container":
                yield f"request_log.store is {store!r}; allowed: no folder of the gateway's machine"
            elif not _matches(store, self.queues):
                yield f"request_log.store is {store!r}; allowed: {_listed(self.queues)}"

    def _container_faults(self, settings: FunctionSettings) -> Iterator[str]:
        image, resources = settings.image.name, settings.resources
        if image is not None and not _matches(image, self.images):
            yield f"image.name is {image!r}; allowed: {_listed(self.images)}"
        if image is not None and (network := resources.network or "none") not in self.networks:
            yield f"resources.network is {network!r}; allowed: {_listed(self.networks)}"
        contained = {"tmp_mb": MAX_TMP_MB} if self.kind == "container" else {}
        limits = {"gpus": self.gpus, "memory_mb": self.memory_mb, "cpus": self.cpus, **contained}
        for name, most in limits.items():
            used = getattr(resources, name)
            # An unset `tmp_mb` does not mean all: a container always has a limit for its temporary files.
            unset = used is None and name not in contained
            if most is not None and (unset or (used or 0) > most):
                shown = "not set, which means all" if unset else used
                yield f"resources.{name} is {shown}; allowed: at most {most}"


class StoredPolicy(DeployPolicy, extra="allow"):
    """The policy of a stored key. If a newer pilotflame has given it limits that this one does not know, it allows no deploy."""

    def faults(self, settings: FunctionSettings, outside: Mapping[str, str]) -> Iterator[str]:
        for name in unknown_members(self):
            yield f"this version of pilotflame does not know the limit {name}"
        yield from super().faults(settings, outside)


class Deployer(NamedTuple):
    """An API key that has deployed something, or wants to. Without a key, both fields are ""."""

    key_id: str
    name: str


@dataclass(frozen=True, slots=True)
class DeployPolicies:
    """The gateway's policy, and the policies of the API keys. A function must satisfy both."""

    gateway: DeployPolicy = field(default_factory=lambda: DeployPolicy(kind="trusted"))
    of_key: Callable[[str], DeployPolicy | None] = lambda _key_id: None
    """Returns the policy of the API key with this id; None if the key has no policy or is unknown."""
    snapshot_identity: tuple[str, ...] = ()
    """Patterns of the URLs for which functions that are not trusted may use the gateway's credentials."""
    snapshot_addresses: Addresses = field(default_factory=Addresses)
    """The addresses from which snapshots of functions that are not trusted are fetched."""
    queue_addresses: Addresses = field(default_factory=Addresses)
    """The addresses at which the event sources of functions that are not trusted may be."""
    snapshot_signers: tuple[str, ...] = ()
    """The public keys by one of which every snapshot must be signed. Without keys, no signature is required."""

    def access(self, url: str, key_id: str) -> Access:
        """Return the rule for fetching a snapshot of a function that was deployed with this key.

        `url` is the URL in the function's settings.
        """
        if self._trusts(key_id):
            return ANY
        return Access(own_only=not _matches(url, self.snapshot_identity), addresses=self.snapshot_addresses)

    def queue_access(self, key_id: str) -> Access:
        """Return the rule for the event sources of a function that was deployed with this key."""
        return ANY if self._trusts(key_id) else Access(own_only=True, addresses=self.queue_addresses)

    def _trusts(self, key_id: str) -> bool:
        return all(policy.kind == "trusted" for _whose, policy in self._both(key_id))

    def confined(self, key_id: str) -> bool:
        """Return True if only code in containers may be deployed with this key."""
        policy = self.of_key(key_id) if key_id else None
        return policy is not None and policy.kind == "container"

    def same_owner(self, one: Deployer, other: Deployer) -> bool:
        """Return True if the second key may change what was deployed with the first.

        Two keys with which only containers may be deployed have the same owner if they have the same name. Two other keys
        always have the same owner, because their code runs as the same user. A key of the one kind and a key of the other
        never have the same owner.
        """
        confined = self.confined(one.key_id), self.confined(other.key_id)
        return confined == (False, False) or (confined == (True, True) and one.name == other.name)

    def fault(self, settings: FunctionSettings, outside: Mapping[str, str], key_id: str) -> str:
        """Return a text that says which policy forbids a function that was deployed with this key, and why; "" if no policy forbids it."""
        for whose, policy in self._both(key_id):
            if found := list(policy.faults(settings, outside)):
                return f"The policy of {whose} does not allow {settings.name}: {'; '.join(found)}."
        return ""

    def check(self, settings: FunctionSettings, outside: Mapping[str, str], key_id: str) -> None:
        """Raise PolicyViolation if a function may not be deployed with this key."""
        if fault := self.fault(settings, outside, key_id):
            remedy = "Change the function's settings, or ask the gateway's owner for more."
            raise PolicyViolation(fault, remedy=remedy)

    def check_place(self, setting: str, place: str, key_id: str) -> None:
        """Raise PolicyViolation if a function that was deployed with this key may not use `place`, a URL in a plugin's setting.

        The plugin calls this itself, because a deploy checks only settings that the core knows. The message does not say
        what is allowed, because callers of the function may see it.
        """
        if not all(_matches(place, policy.queues) for _whose, policy in self._both(key_id)):
            fault = f"The policy of the function does not allow the place in {setting}."
            raise PolicyViolation(
                fault, remedy="Ask the gateway's owner to list it in `queues` of the policy."
            )

    def check_path(self, key_id: str) -> None:
        """Raise PolicyViolation if this key may not deploy a folder of the gateway's machine.

        Call this before the folder is read, because the errors of a deploy tell what the folder contains.
        """
        for whose, policy in self._both(key_id):
            if policy.kind == "container":
                message = f"The policy of {whose} allows no folders of the gateway's machine."
                raise PolicyViolation(message, remedy="Upload the folder: pilotflame deploy --upload.")

    def _both(self, key_id: str) -> Iterator[tuple[str, DeployPolicy]]:
        yield "the gateway", self.gateway
        if key_id and (policy := self.of_key(key_id)) is not None:
            yield f"the API key {key_id}", policy


ALL_ALLOWED = DeployPolicies()
"""The policies of a gateway without settings and keys. They allow everything."""


def unknown_members(stored: BaseModel) -> list[str]:
    """Return the names of the members that a newer pilotflame has stored, without null members: null means that the limit is not set."""
    return [name for name, value in (stored.model_extra or {}).items() if value is not None]


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    if "*" in patterns:
        return True
    # Refuse "..": a path could begin like an allowed path and leave its folder. Refuse control characters, because programs treat
    # them differently. Decode twice, because some programs decode a decoded text again.
    plain = unquote(unquote(text))
    if _STEP_UP.search(plain) or _CONTROL.search(plain):
        return False
    return any(_matcher(pattern).fullmatch(text) for pattern in patterns)


def _matcher(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern. In the host of a URL, * matches none of / @ ? #, so that it matches only a part of the host."""
    scheme, mark, rest = pattern.partition("://")
    if not mark:
        scheme, rest = "", pattern
    host, slash, path = rest.partition("/")
    within = "[^/@?#]*" if mark else ".*"
    return re.compile(
        f"{re.escape(scheme + mark)}{_starred(host, within)}{slash}{_starred(path, '.*')}", re.DOTALL
    )


def _starred(text: str, star: str) -> str:
    return star.join(map(re.escape, text.split("*")))


def _listed(allowed: tuple[str, ...]) -> str:
    return ", ".join(allowed) or "none"
