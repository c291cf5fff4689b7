"""Reads the cog.yaml of a predictor: the packages it needs, and how many predictions run at once.

The other settings of cog.yaml have no effect here. Only `pilotflame build` installs the system packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....errors import SettingsError

COG_YAML = "cog.yaml"
REQUIREMENTS_FILE = "requirements.txt"
# The variable in which Cog's own images pass `concurrency.max` to the predictor.
CONCURRENCY = "COG_MAX_CONCURRENCY"
MAX_BYTES, MAX_PACKAGES = 64 << 10, 1000
_MERGE = "tag:yaml.org,2002:merge"
YamlText = Annotated[str, Field(max_length=1000)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CogBuild(_Section):
    python_packages: list[YamlText] | None = Field(None, max_length=MAX_PACKAGES)
    python_requirements: YamlText | None = None
    system_packages: list[YamlText] | None = Field(None, max_length=MAX_PACKAGES)


class CogConcurrency(_Section):
    max: int = Field(1, ge=1, le=1024)


class CogYaml(_Section):
    """The settings of a cog.yaml that have an effect."""

    build: CogBuild = CogBuild()
    concurrency: CogConcurrency = CogConcurrency()

    @classmethod
    def read(cls, folder: Path) -> CogYaml:
        """Return the settings, or the defaults if there is no cog.yaml. Raise SettingsError if it is malformed."""
        # Imported here, because few functions have such a file.
        import yaml  # noqa: PLC0415

        file = folder / COG_YAML
        if not file.is_file():
            return cls()
        try:
            if file.stat().st_size > MAX_BYTES:
                raise _malformed(f"it has more than {MAX_BYTES} bytes")
            found = yaml.load(file.read_text(encoding="utf-8"), Loader=_loader(yaml.SafeLoader))  # noqa: S506
            return cls.model_validate(found or {})
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise _malformed(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise _malformed(" ".join(str(error).split())) from None

    def env(self) -> dict[str, str]:
        """Return the environment variables that pass settings of cog.yaml to the predictor."""
        return {CONCURRENCY: str(self.concurrency.max)} if self.concurrency.max > 1 else {}

    def requirements(self, folder: Path) -> str:
        """Return the requirements that cog.yaml adds to those in requirements.txt, one a line."""
        lines = list(self.build.python_packages or ())
        named = self.build.python_requirements or REQUIREMENTS_FILE
        file = (folder / named).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise _malformed(f"build.python_requirements is {named!r}, which is not in the folder")
        if file != (folder / REQUIREMENTS_FILE).resolve():
            try:
                if file.stat().st_size > MAX_BYTES:
                    raise _malformed(
                        f"build.python_requirements is {named!r}, which has more than {MAX_BYTES} bytes"
                    )
                lines.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeError) as error:
                raise _malformed(f"build.python_requirements is {named!r}: {error}") from None
        return "\n".join(lines)


def _loader(safe: Any) -> Any:
    """Return a YAML loader that refuses merged mappings, because a small file with such mappings could fill the memory."""

    class Loader(safe):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == _MERGE for key, _ in node.value):
                raise _malformed("it merges mappings (<<)")
            super().flatten_mapping(node)

    return Loader


def _malformed(why: str) -> SettingsError:
    return SettingsError(f"{COG_YAML} cannot be used: {why}.", remedy="Correct it, as Cog's reference says.")
