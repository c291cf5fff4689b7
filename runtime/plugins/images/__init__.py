"""Builds container images from functions' folders.

`build_context.py` writes the folder that an engine builds from. `image_engine.py` runs docker, podman or buildah.
"""
