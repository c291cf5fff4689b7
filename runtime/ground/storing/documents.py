"""Defines `Documents`: what any store of documents does. `FileDocuments` is for one gateway, `PostgresDocuments` for several.

A document is small bytes with a name, for example `access/keys.json`. Several gateways may share the documents. All methods
block, and are safe to call from several threads. A change is durably stored when its method returns. All methods raise
GatewayError if a name is not valid, or if the store cannot be read or written. The message says where the document is.

Lost updates: two gateways may change the same document at the same time, each on the basis of what it has read. So a change that
depends on the present content must use `update`, which is atomic over all gateways. `put` and `remove` are for changes that do
not depend on the content: the last writer wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from ....errors import GatewayError

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
"""What a document's name looks like: ASCII letters, digits, `.`, `_` and `-`, in parts with slashes between them. No part begins
with a dot, so a name cannot lead out of the folder or to a hidden file. If there is a document `a`, there must be no document `a/b`.
"""


class Documents(Protocol):
    """The documents of a gateway, or of several gateways together."""

    def all(self, prefix: str) -> dict[str, bytes]:
        """Return the documents whose names begin with `prefix`, by their names. The prefix ends with a slash."""

    def get(self, name: str) -> bytes | None:
        """Return a document, or None if it does not exist."""

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Create or replace a document. Without `durable`, a power loss may undo the change or damage the document."""

    def remove(self, name: str) -> None:
        """Remove a document if it exists."""

    def update(self, name: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace a document by what `change` makes of it, and return the new document. None stands for a document that does not exist.

        No other change of the document happens between the call of `change` and the write. A store may call `change` again with a newer
        document, so `change` must have no other effect, and must not read or change documents. If `change` raises an error, the document stays
        as it is. If the answer to the write is lost, the store finds out whether the document was written before it calls `change` again.
        """

    def generation(self, prefix: str) -> int:
        """Return a number that grows with each change, by any gateway, of a document whose name begins with `prefix`.

        So a gateway can look for the changes of other gateways without reading documents. Compare the number only with numbers from the same object.
        """

    def close(self) -> None:
        """Close connections, if there are any. No other call may run at the same time, or later."""

    def place(self, name: str) -> str:
        """Return where a document is, for messages to operators."""


def check_document_name(name: str) -> str:
    """Return `name` unchanged. Raise GatewayError if it does not match NAME."""
    if not NAME.fullmatch(name):
        raise GatewayError(f"{name[:64]!r} cannot be the name of a document.")
    return name
