"""Converts weights from and to other formats, and copies (pushes) snapshots to S3 or another folder.

The entry points are the modules `convert` and `push`. For each input format, a class that implements `TensorOrigin`
reads the tensors, and `writer` writes them as safetensors files. This package needs torch.
"""
