"""Loads keys and secrets again after another gateway with the same documents has changed them."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from ....errors import GatewayError
from ..storing.documents import Documents
from .keyring import ACCESS, Keyring
from .secrets import Secrets

LOG = logging.getLogger(__name__)


class AccessChanges(NamedTuple):
    """The changes since the last look."""

    revoked: frozenset[str] = frozenset()
    """The ids of the removed keys. It contains "" if callers without a key are no longer admitted."""
    functions: frozenset[str] = frozenset()
    """The functions whose secrets have changed."""


class AccessWatch:
    """Keeps the keys and secrets in memory equal to the documents. Call it from one thread at a time."""

    def __init__(self, documents: Documents, keyring: Keyring, secrets: Secrets, grace_s: float) -> None:
        """Call this just after the keys and secrets were loaded. If they cannot be read again, the keys in memory stay valid for `grace_s`."""
        self._documents, self._keyring, self._secrets, self._grace_s = documents, keyring, secrets, grace_s
        keyring.current_until_s = time.time() + grace_s
        self._admitted = self._admitted_now()
        self._seen: int | None = None
        """The generation whose keys and secrets are all in memory. It is None at first. The first `look` then loads keys and secrets again, which
        may have changed since the caller loaded them.
        """
        self._warned: tuple[int | None] | None = None
        """A tuple of the generation for which errors were logged, where None means that it could not be read. None if the last `look` has
        succeeded.
        """

    def look(self) -> AccessChanges:
        """Load keys and secrets again if a document has changed, and return their changes. Blocks.

        If a document is damaged or cannot be read, its keys or secrets in memory stay, and the next call loads all documents again. The
        errors are logged once for each generation. They are not raised.
        """
        generation, until_s = None, time.time() + self._grace_s
        functions, errors = frozenset[str](), list[GatewayError]()
        try:
            # Read the generation before the documents. A later change increases the generation, so the next call loads the documents again.
            generation = self._documents.generation(ACCESS)
            if generation == self._seen:
                self._note(generation, [], until_s)
                return AccessChanges()
            errors += self._load_keys()
            functions, damaged = self._secrets.reload()
            errors += damaged
        except GatewayError as error:
            errors.append(error)
        self._note(generation, errors, until_s)
        before, self._admitted = self._admitted, self._admitted_now()
        return AccessChanges(before - self._admitted, functions)

    def _load_keys(self) -> list[GatewayError]:
        try:
            self._keyring.load()
        except GatewayError as error:
            return [error]
        return []

    def _note(self, generation: int | None, errors: list[GatewayError], until_s: float) -> None:
        if not errors:
            self._seen, self._warned, self._keyring.current_until_s = generation, None, until_s
        elif self._warned != (generation,):
            self._warned = (generation,)
            for error in errors:
                LOG.warning("Keys or secrets that another gateway has changed are not loaded: %s", error)

    def _admitted_now(self) -> frozenset[str]:
        """Return the ids of all keys, or only "" if callers need no key."""
        return frozenset(key.id for key in self._keyring.all()) if self._keyring.exists else frozenset([""])
