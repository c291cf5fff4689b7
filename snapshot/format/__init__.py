"""What a snapshot is: the manifest, safetensors headers, chunks; making one and verifying one."""
