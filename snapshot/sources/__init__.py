"""Reads the files of snapshots from sources: folders, web servers and S3. Writes to folders and S3.

The entry point is `locate.open_source`. The module `source` defines the interface. This package handles any
bytes: it knows nothing about manifests or tensors.
"""
