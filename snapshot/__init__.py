"""Creates, stores, fetches and restores snapshots: safetensors files with a manifest in the same folder.

Handlers use only the objects of `handle` and `named`. `caching` stores snapshots on a node, `restoring` maps their
files into memory and sets the weights of modules, `converting` reads and writes other formats, `fetching` downloads
chunks, `format` defines the manifest, `sources` reads folders, web servers and clouds, and `registries` reads
registries of artifacts and models. `peering` exchanges chunks with other nodes, and `publish` writes files atomically.
This package must not import `handlers` or `runtime`.
"""
