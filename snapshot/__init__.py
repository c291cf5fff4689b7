"""Snapshots: ordinary safetensors files with a manifest beside them, restored by mapping. A library without the runtime.

`handle` is what handlers see. Below it, `caching` keeps snapshots on a node, `restoring` maps them into modules,
`converting` reads and writes other formats, `fetching` downloads chunks, `format` has the manifest, `sources` reads
folders, web servers and S3, and `publish` writes files atomically. Nothing here knows `handlers` or `runtime`.
"""
