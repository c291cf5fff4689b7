"""Exchanges chunks of snapshots with other nodes: takes missing chunks from them, and serves the chunks of this node.

The entry points are `peers`, which a fetch calls, and `chunk_server`, which answers other nodes. Only the node's
fetcher imports this package.
"""
