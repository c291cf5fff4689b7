"""Where bytes lie on a node: tiers with budgets, one fetch for all who ask, eviction of what nobody maps."""
