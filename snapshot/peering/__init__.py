"""Exchanges chunks of snapshots with other nodes: takes missing chunks from them, and serves the chunks of this node.

Enter at `peers` (what a fetch calls) and `chunk_server` (what other nodes call). Only the node's fetcher imports this.
"""
