"""The snapshot format: the manifest, safetensors headers, creating and verifying. docs/snapshot-format.md specifies it.

Enter at `manifest`, `create` or `verify`. Torch is never imported here: converting and restoring do that.
"""
