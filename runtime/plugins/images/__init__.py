"""Builds container images from functions' folders.

`build_context.py` writes what an engine builds from, and `image_engine.py` runs docker, podman or buildah.
"""
