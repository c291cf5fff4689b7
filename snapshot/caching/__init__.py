"""Stores snapshots on a node, in tiers with budgets, and fetches each snapshot once. The entry point is `Cache`."""
