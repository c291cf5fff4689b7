"""Reads the files of snapshots from sources: folders, web servers, clouds and the hub. Writes to folders and clouds.

The entry point is `locate.open_source`. The module `source` defines the interface. This package handles any
bytes: it knows nothing about manifests or tensors.
"""
