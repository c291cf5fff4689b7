"""The runtime: gateway, revisions, replicas, zygotes and workers."""
