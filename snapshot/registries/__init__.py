"""Reads snapshots from registries, such as OCI registries, whose artifacts hold weights as layers, and MLflow's model registry.

Each module with a source has a row in `sources.schemes`. This package handles bytes and names: it knows nothing about
snapshot manifests or tensors.
"""
