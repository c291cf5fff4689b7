"""Check every manifest in infra/ for misspelt fields, missing files and invalid queries.

    python infra/check.py [FOLDER]

Kubernetes kinds are checked against the schemas of Kubernetes (strictly, from `kubernetes-validate`), compose files
against the compose specification (`compose-spec`), Containerfiles by hadolint, Prometheus files by promtool (found as
$PROMTOOL or on the PATH), units by `systemd-analyze verify` and by a list of directives, and the rest against the
models in custom_kinds.py and observability.py. The script names a checker that is not installed, and still makes the other
checks of the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import compose_spec
import jsonpatch
import jsonpointer
import kubernetes_validate
import yaml
from custom_kinds import KINDS, KnativeService, Kustomization, ScaledObject, Strict
from observability import Alertmanager, Dashboard, Datasources, Providers, RuleFile, parse_query
from pydantic import ValidationError

INFRA = Path(__file__).resolve().parent
# The oldest and the newest version that the manifests are for.
KUBERNETES = ("1.28", "1.34")
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool") or ""
# The known directives. Any other directive is most likely misspelt, and systemd would ignore it.
DIRECTIVES = {
    "Unit": "After Description Wants",
    "Install": "WantedBy",
    "Socket": "Backlog ListenStream",
    "Service": """CacheDirectory CapabilityBoundingSet Delegate DynamicUser Environment EnvironmentFile ExecStart
        KillMode LimitNOFILE LockPersonality NoNewPrivileges OOMPolicy PrivateTmp ProtectClock ProtectHome
        ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables ProtectSystem Restart RestartSec
        RestrictAddressFamilies RestrictRealtime RestrictSUIDSGID StateDirectory StateDirectoryMode SupplementaryGroups
        SystemCallArchitectures SystemCallErrorNumber SystemCallFilter TimeoutStopSec Type UMask""",
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
Check = Callable[[Path], Iterator[str]]


def problems(path: Path) -> Iterator[str]:
    """Yield the faults of one file below a folder like infra/. A file that no check is made for is a fault,
    too.
    """
    found = [check for pattern, check in CHECKS if path.match(pattern)]
    if not found:
        yield "no check in infra/check.py matches this file"
    for check in found[:1]:
        try:
            yield from check(path)
        except (yaml.YAMLError, json.JSONDecodeError) as error:
            yield f"cannot be parsed: {error}"


def manifests(root: Path = INFRA) -> list[Path]:
    """Return all files below the folders that hold manifests."""
    folders = sorted({pattern.split("/")[0] for pattern, _ in CHECKS})
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*"))]
    return [path for path in paths if path.is_file() and path.name != "metrics.key"]


# -- Kubernetes, Knative, KEDA


def _kubernetes(path: Path) -> Iterator[str]:
    for document in _documents(path):
        yield from _object(document)


def _object(document: dict[str, Any]) -> Iterator[str]:
    group, kind = str(document.get("apiVersion", "")).split("/")[0], document.get("kind", "")
    model = KINDS.get(f"{group}/{kind}")
    if model is None:
        yield from _builtin(document)
        return
    yield from _model(model, document)
    if model is ScaledObject:
        yield from _scaled_queries(document)
    if model is KnativeService:
        yield from _knative_pod(document)


def _builtin(document: dict[str, Any]) -> Iterator[str]:
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.absolute_path))
            yield f"{document['kind']} {where}: {error.message[:300]}"
        except (kubernetes_validate.SchemaNotFoundError, KeyError):
            yield f"no kind of Kubernetes {version}: {document.get('apiVersion')} {document.get('kind')}"


def _scaled_queries(document: dict[str, Any]) -> Iterator[str]:
    for trigger in document["spec"].get("triggers", ()):
        if "query" in trigger.get("metadata", ()):
            yield from _query(trigger["metadata"]["query"])


def _knative_pod(document: dict[str, Any]) -> Iterator[str]:
    spec = document["spec"].get("template", {}).get("spec", {})
    own = ("containerConcurrency", "timeoutSeconds")
    pod = deepcopy({key: value for key, value in spec.items() if key not in own})
    # Knative sets the name of the container and the port of its probes itself.
    for container in pod.get("containers", ()):
        container.setdefault("name", "user-container")
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            if (get := container.get(probe, {}).get("httpGet")) is not None:
                get.setdefault("port", 8080)
    yield from _builtin({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})


def _kustomization(path: Path) -> Iterator[str]:
    (document,) = _documents(path)
    yield from (found := list(_object(document)))
    if not found:
        try:
            rendered = _rendered(path)
        except (OSError, ValueError, jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as error:
            yield f"cannot be rendered: {error}"
            return
        for one in rendered:
            yield from (f"rendered: {problem}" for problem in _object(one))


def _rendered(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization, with its images and patches. Raise if it names a missing object."""
    own = Kustomization.model_validate(_documents(path)[0])
    objects: list[dict[str, Any]] = []
    for name in own.resources:
        there = path.parent / name
        objects += _rendered(there / path.name) if there.is_dir() else _documents(there)
    containers = [one for found in objects for one in _containers(found)]
    for image in own.images:
        changed = [
            one
            for one in containers
            if one["image"].rpartition(":")[0] == image.name or one["image"] == image.name
        ]
        if not changed:
            raise ValueError(f"no container has the image {image.name}")
        for one in changed:
            one["image"] = f"{image.new_name or image.name}:{image.new_tag}"
    for patch in own.patches:
        wanted = (patch.target.kind, patch.target.name)
        places = [n for n, one in enumerate(objects) if (one["kind"], one["metadata"]["name"]) == wanted]
        if len(places) != 1:
            raise ValueError(f"{len(places)} objects are the target {' '.join(wanted)} of a patch")
        objects[places[0]] = jsonpatch.apply_patch(objects[places[0]], yaml.safe_load(patch.patch))
    return objects


def _containers(found: dict[str, Any]) -> list[dict[str, Any]]:
    spec = found.get("spec", {}).get("template", {}).get("spec", {})
    return [one for one in spec.get("containers", ()) if "image" in one]


# -- compose and Containerfiles


def _compose(path: Path) -> Iterator[str]:
    text = _VARIABLE.sub(lambda match: match[3] if match[2] == "-" else "given", path.read_text())
    # compose-spec supports no tags of YAML, and no image with both a tag and a digest.
    text = re.sub(r"!(reset|override)\b", "", re.sub(r"(image: .*)@sha256:[0-9a-f]{64}", r"\1", text))
    try:
        compose_spec.PyCompose.from_yaml(text)
    except ValueError as error:
        yield str(error)
        return
    services = yaml.safe_load(text)["services"]
    for name, service in services.items():
        for needed in (service or {}).get("depends_on", {}).keys() - services.keys():
            yield f"services.{name}.depends_on: there is no service {needed}"
        for volume in (service or {}).get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith(".") and not (path.parent / source).exists() and not source.endswith(".key"):
                yield f"services.{name}.volumes: {source} is not there"


def _containerfile(path: Path) -> Iterator[str]:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        _left_out(path, "hadolint")
        return
    yield from _run([hadolint, "--no-color", "--failure-threshold", "warning", str(path)])


# -- Prometheus and Grafana


def _rules(path: Path) -> Iterator[str]:
    (document,) = _documents(path)
    yield from (found := list(_model(RuleFile, document)))
    if not found:
        for group in document["groups"]:
            for rule in group["rules"]:
                yield from _query(rule["expr"])
    yield from _promtool(path, "check", "rules")


def _dashboard(path: Path) -> Iterator[str]:
    document = json.loads(path.read_text())
    yield from (found := list(_model(Dashboard, document)))
    if not found:
        for panel in document["panels"]:
            for target in panel["targets"]:
                yield from _query(target["expr"])


def _query(query: str) -> Iterator[str]:
    try:
        parse_query(query)
    except ValueError as error:
        yield f"no query of Prometheus: {query!r}: {error}"


def _promtool(path: Path, *command: str) -> Iterator[str]:
    if not os.access(PROMTOOL, os.X_OK):
        _left_out(path, "promtool")
        return
    yield from _run([PROMTOOL, *command, str(path)])


# -- systemd


def _unit(path: Path) -> Iterator[str]:
    section = ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("["):
            section = line.strip("[]")
            if section not in DIRECTIVES:
                yield f"line {number}: no section of a unit: {line}"
        elif line and not line.startswith("#"):
            name = line.partition("=")[0]
            if name not in DIRECTIVES.get(section, "").split():
                yield f"line {number}: {name} is not among the directives of [{section}] in infra/check.py"
    yield from _verified(path)


def _verified(path: Path) -> Iterator[str]:
    """Yield the messages of `systemd-analyze verify` about a unit, whose program is replaced by one that
    exists.
    """
    if shutil.which("systemd-analyze") is None:
        _left_out(path, "systemd-analyze")
        return
    with tempfile.TemporaryDirectory() as folder:
        for unit in path.parent.iterdir():
            text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/sh", unit.read_text())
            # A .conf file is a part of the unit, for machines with an engine.
            place = Path(folder, "pilotflame.service.d" if unit.suffix == ".conf" else "", unit.name)
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
        verified = "pilotflame.service" if path.suffix == ".conf" else path.name
        done = _finished(["systemd-analyze", "verify", "--man=no", str(Path(folder, verified))])
        # systemd-analyze reports some faults only as warnings, so every line about a unit file counts.
        yield from (line for line in done.stderr.splitlines() if folder in line or path.name in line)


# -- all


def _documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def _model(model: type[Strict], document: dict[str, Any]) -> Iterator[str]:
    try:
        model.model_validate(document)
    except ValidationError as error:
        for one in error.errors():
            yield f"{'.'.join(map(str, one['loc']))}: {one['msg']}"


def _run(command: list[str]) -> Iterator[str]:
    done = _finished(command)
    if done.returncode:
        yield f"{Path(command[0]).name}: {(done.stdout + done.stderr).strip()}"


def _finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _left_out(path: Path, program: str) -> None:
    print(f"{path.name}: left out what {program} checks, because it is not installed", file=sys.stderr)


def _with_model(model: type[Strict]) -> Check:
    return lambda path: _model(model, _documents(path)[0])


# The first pattern that matches a file decides.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("gateway/Containerfile", _containerfile),
    ("compose/compose*.yaml", _compose),
    ("compose/prometheus.yml", lambda path: _promtool(path, "check", "config", "--syntax-only")),
    ("compose/alertmanager.yml", _with_model(Alertmanager)),
    ("compose/grafana/datasource.yaml", _with_model(Datasources)),
    ("compose/grafana/dashboards.yaml", _with_model(Providers)),
    ("kubernetes/*/kustomization.yaml", _kustomization),
    ("kubernetes/*/*/kustomization.yaml", _kustomization),
    ("kubernetes/base/*.yaml", _kubernetes),
    ("kubernetes/overlays/*/*.yaml", _kubernetes),
    ("knative/*.yaml", _kubernetes),
    ("keda/*.yaml", _kubernetes),
    ("systemd/*", _unit),
    ("prometheus/rules.yaml", _rules),
    ("prometheus/rules_test.yaml", lambda path: _promtool(path, "test", "rules")),
    ("grafana/*.json", _dashboard),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the manifests in infra/.")
    parser.add_argument("folder", nargs="?", type=Path, default=INFRA)
    root: Path = parser.parse_args().folder
    paths = manifests(root)
    found = [f"{path.relative_to(root)}: {problem}" for path in paths for problem in problems(path)]
    print("\n".join(found) or f"{len(paths)} files are right")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
