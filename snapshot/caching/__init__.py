"""Snapshots kept on a node: tiers with budgets, one fetch for all openers, eviction. Enter at `Cache`."""
