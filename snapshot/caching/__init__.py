"""Stores snapshots on a node, in tiers with budgets, and fetches each once for all openers.

Start at `Cache`.
"""
