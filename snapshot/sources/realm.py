"""Computes the realm of a function. On a node, only functions of the same realm share snapshots and reuse bytes.

A manifest is untrusted: its author may know the digests of weights without the right to read the weights. Also, digests
do not protect against bytes that are constructed to have the same digest. So a function gets bytes that are on the node
only if it could have fetched these bytes itself: from the same place, with the same credentials.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from .access import ANY, Access
from .locate import split_file
from .schemes import scheme_of


def realm_of(url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> str:
    """Return the realm of `url` for a function with these secrets. The realm of a folder of this machine is "".

    A realm is a place and credentials. The place is the bucket, the owner of the repository on the hub or, on a web
    server, the parent of the folder in `url`. Each folder at the root of a web server is a place of its own: such
    folders may belong to different people, as the buckets of a store do. A function's secrets, which are its
    credentials and endpoints, are part of its realm. The credentials and endpoints of this process are not, so that the
    operator may change them and keep the cache. But a function that may not use the credentials of this process has a different
    realm. The realm is a hash, which shows no credentials.
    """
    folder, _ = split_file(url)
    if (scheme := scheme_of(folder)) is None:
        return ""
    given = scheme.own(secrets)
    parts = [scheme.place(folder), sorted(given.items()), *(["own"] if access.own_only else [])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
