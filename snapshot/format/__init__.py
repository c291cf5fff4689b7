"""Implements the snapshot format, which docs/snapshot-format.md specifies: manifests and safetensors headers.

The entry points are the modules `manifest`, `create` (makes a manifest of files) and `verify` (compares files
with their manifest). This package never imports torch. The packages `converting` and `restoring` do.
"""
