"""Converts weights from and to other formats, and copies (pushes) snapshots to S3 or another folder.

The entry points are the modules `convert` and `push`. A class for each input format implements `TensorOrigin`
and reads its tensors, which `writer` writes as safetensors files. This package needs torch.
"""
