"""Takes chunks of a snapshot from other nodes that have them, and gives them those that are here.

Enter at `peers` (what a fetch calls) and `chunk_server` (what other nodes call). Only the node's fetcher imports this.
"""
