"""What `pilotflame build` prints after a build. tests/runtime/images builds images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pilotflame.runtime.plugins.images.command import deploy_hint


def test_the_printed_deploy_command_names_the_folder() -> None:
    hint = deploy_hint(Path("my functions/hello"), "localhost/pilotflame/hello@sha256:ab")
    assert (
        "pilotflame deploy 'my functions/hello' --set image.name=localhost/pilotflame/hello@sha256:ab" in hint
    )


def test_a_list_of_packages_is_refused_with_what_to_use(tmp_path: Path, run: Any) -> None:
    done = run("build", tmp_path, "--sbom", "packages.json")
    assert done.returncode == 2
    assert "--sbom is gone. syft, trivy and docker's --sbom list the packages" in done.stderr
