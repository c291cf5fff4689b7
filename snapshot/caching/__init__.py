"""Stores snapshots on a node, in tiers with budgets, and fetches each once. The entry point is `Cache`."""
