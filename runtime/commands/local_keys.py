"""Home: the keys of a gateway on this machine, reached through its state folder, whether or not it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import orjson

from ..access.control_socket import find_control_socket
from ..access.keyring import Keyring
from ..access.keys import parse_new_key
from ..settings.gateway_settings import read_gateway_settings
from ..settings.state_dir import locked_state_dir
from . import options
from .client import Client


class Keys(Protocol):
    """Where keys are made: a gateway, or its files."""

    def create_key(self, wanted: Mapping[str, Any]) -> dict[str, Any]: ...
    def keys(self) -> list[dict[str, Any]]: ...
    def revoke_key(self, key_id: str) -> None: ...


class Files:
    """The keys of a gateway that does not run; it finds them when it starts."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def create_key(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        key, token = self._keyring.create(parse_new_key(orjson.dumps(dict(wanted))), time.time())
        return {**key.shown(), "key": token}

    def keys(self) -> list[dict[str, Any]]:
        return [key.shown() for key in self._keyring.all()]

    def revoke_key(self, key_id: str) -> None:
        self._keyring.revoke(key_id)


@contextmanager
def at_home(state_dir: Path | None) -> Iterator[Keys]:
    """The keys of the state folder's gateway: asked through its own socket if it runs, else changed in its files."""
    settings = read_gateway_settings(os.environ, other_variables=options.OTHER_VARIABLES, state_dir=state_dir)
    if (own := find_control_socket(settings.state_dir)) is not None:
        with Client(own=own) as client:
            yield client
        return
    with locked_state_dir(settings.state_dir) as state:
        keyring = Keyring(state)
        keyring.load()
        yield Files(keyring)
