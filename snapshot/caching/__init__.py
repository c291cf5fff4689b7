"""Snapshots kept on a node: tiers with budgets, one fetch for all openers, eviction. Enter at `Cache` or `node_cache`; or `download`."""
