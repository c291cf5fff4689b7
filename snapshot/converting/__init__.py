"""Converting weights from and to other formats, and pushing snapshots to other places.

Enter at `convert` or `push`. Each format is an origin of tensors; `writer` writes safetensors. Needs torch.
"""
