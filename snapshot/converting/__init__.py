"""Converts weights from and to other formats, and copies (pushes) snapshots to S3 or another folder.

The entry points are the modules `convert` and `push`. Each input format has a class that implements
`TensorOrigin` and reads its tensors. The module `writer` writes them as safetensors files. This package needs
torch.
"""
