"""Lets a gateway serve the functions of all gateways with the same database."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..node.functions.follower import Follower
from ..node.functions.shared_revisions import GatewayPeers, SharedRevisions
from ..node.packaging.revision_files import RevisionFiles
from .node import RunningNode


def share_functions(
    node: RunningNode, database: str, peers: GatewayPeers, advanced: Callable[[int], object], stack: contextlib.ExitStack
) -> Follower:  # fmt: skip
    """Return the follower of the other gateways' changes. `database` is a connection string of libpq, and its tables are there.

    Await `catch_up` before the stored functions are restored, and `follow` about each second afterwards.
    """
    # A gateway without a database does not import psycopg.
    from ..ground.storing.postgres_blobs import PostgresBlobs  # noqa: PLC0415
    from ..ground.storing.postgres_revision_index import PostgresRevisionIndex  # noqa: PLC0415

    index = PostgresRevisionIndex(database, node.functions.settings.keep_revisions)
    blobs = PostgresBlobs(database, "revision_files")
    for close in (blobs.close, index.close):
        stack.callback(close)
    functions, revisions = node.functions, node.revisions
    functions.shared = SharedRevisions(
        index, RevisionFiles(blobs), peers, functions.store, functions.policies, revisions.environments,
        revisions.dialects, revisions.threads,
    )  # fmt: skip
    return Follower(functions.shared, node.rollouts, node.retirements, advanced)
