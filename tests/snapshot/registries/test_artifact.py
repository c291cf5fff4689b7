"""The manifest of an artifact is bounded: a registry that a deployer names chooses its bytes."""

from __future__ import annotations

import json

import pytest
from pilotflame.errors import SourceError
from pilotflame.snapshot.registries.artifact import ImageManifest

LAYER = {"mediaType": "x", "digest": f"sha256:{'0' * 64}", "size": 1}


def test_only_the_first_wrong_annotation_is_described() -> None:
    wrong = {"layers": [LAYER | {"annotations": {str(number): number for number in range(50_000)}}]}
    with pytest.raises(SourceError, match=r"layers\.0\.annotations\.0: Input should be a valid string"):
        ImageManifest.parse(json.dumps(wrong).encode(), "here")


def test_only_the_first_wrong_layer_is_described() -> None:
    with pytest.raises(SourceError, match=r"layers\.0\.mediaType"):
        ImageManifest.parse(json.dumps({"layers": [{}] * 10_000}).encode(), "here")


def test_values_are_counted_before_they_are_parsed() -> None:
    text = b'{"layers":[' + b"[]," * 1_000_000 + b"[]]}"
    with pytest.raises(SourceError, match="marks of values"):
        ImageManifest.parse(text, "here")


def test_a_manifest_is_read() -> None:
    (layer,) = ImageManifest.parse(json.dumps({"layers": [LAYER]}).encode(), "here").layers
    assert layer.size_bytes == 1
