"""The manifests in infra/: the checks accept them and find any misspelt field, and the metrics that they name exist."""

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from live import gateway_here, short_folder, until
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
sys.path.append(str(INFRA))

import check  # noqa: E402
import observability  # noqa: E402

PROMTOOL_ALONE = re.compile(r"compose/prometheus\.yml|prometheus/rules_test\.yaml")
NAMES = [str(path.relative_to(INFRA)) for path in check.manifests()]
SCHEMA_CONTENTS = functools.cache(kubernetes_validate.utils.schema_contents)
# People choose the names directly below these keys, so no schema knows a misspelt name there.
FREE = {
    "labels", "annotations", "matchLabels", "pairs", "limits", "requests", "environment", "args", "services", "volumes",
    "exp_labels", "exp_annotations", "selector", "ulimits", "configs",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _schemas_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Cache the schemas, because the package reads 2 MB of JSON for each object that it checks.
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", SCHEMA_CONTENTS)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the folder of a copy of the manifests. A test may change the copy."""
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INFRA / name, tmp_path / name)
    return tmp_path


def keys(value: Any, *path: str | int, free: bool = False) -> Iterator[tuple[str | int, ...]]:
    """Yield the path to each key that a schema defines."""
    if isinstance(value, dict):
        for key, inner in value.items():
            known = not free or str(key).startswith("autoscaling.knative.dev/")
            if known:
                yield (*path, key)
            free_below = known and key in FREE and "matchLabels" not in inner
            yield from keys(inner, *path, key, free=free_below)
    if isinstance(value, list):
        for place, inner in enumerate(value):
            yield from keys(inner, *path, place)


def misspelt(document: Any, path: tuple[str | int, ...]) -> Any:
    """Return the document with one key misspelt."""
    changed = json.loads(json.dumps(document))
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[f"{path[-1]}x"] = inner.pop(path[-1])
    return changed


def test_every_manifest_is_right() -> None:
    assert [problem for name in NAMES for problem in check.problems(INFRA / name)] == []
    assert len(NAMES) >= 20


def test_a_file_that_no_check_knows_is_reported(copy: Path) -> None:
    (copy / "keda/more.yml").write_text("kind: ScaledObject\n")
    assert "no check" in next(check.problems(copy / "keda/more.yml"))


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".yaml", ".yml", ".json"))])
def test_any_misspelt_field_is_found(copy: Path, name: str) -> None:
    if PROMTOOL_ALONE.match(name) and not check.PROMTOOL:
        pytest.skip("promtool is not here; .ci/run fetches it (PROMTOOL)")
    documents = list(yaml.safe_load_all(re.sub("!(reset|override)", "", (INFRA / name).read_text())))
    tried = set()
    for place, document in enumerate(documents):
        for path in keys(document):
            # Misspell each name only once, because a check takes 10 to 100 ms.
            if path[-1] in tried:
                continue
            changed = [*documents[:place], misspelt(document, path), *documents[place + 1 :]]
            # Write JSON, which is also YAML.
            (copy / name).write_text("\n---\n".join(map(json.dumps, changed)))
            assert next(check.problems(copy / name), None), path
            tried.add(path[-1])
    assert len(tried) > 2


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("systemd/")])
def test_any_misspelt_directive_of_a_unit_is_found(copy: Path, name: str) -> None:
    lines = (INFRA / name).read_text().splitlines()
    for place, line in enumerate(lines):
        if line and not line.startswith("#"):
            wrong = line.replace("]", "x]") if line.startswith("[") else line.replace("=", "x=", 1)
            (copy / name).write_text("\n".join([*lines[:place], wrong, *lines[place + 1 :]]))
            assert next(check.problems(copy / name), None), line


def test_any_misspelt_instruction_of_the_containerfile_is_found(copy: Path) -> None:
    path = copy / "gateway/Containerfile"
    text = path.read_text()
    instructions = set(re.findall(r"(?m)^[A-Z]+", text))
    assert {"FROM", "RUN", "USER", "VOLUME", "ENTRYPOINT", "STOPSIGNAL"} <= instructions
    for instruction in instructions:
        path.write_text(re.sub(rf"(?m)^{instruction} ", f"{instruction}X ", text, count=1))
        assert list(check.problems(path)), instruction


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("compose/compose.yaml", "../prometheus/rules.yaml:", "../prometheus/rule.yaml:"),
        ("compose/compose.yaml", "stop_grace_period: 45s", "stop_grace_period: soon"),
        ("kubernetes/base/kustomization.yaml", "- service.yaml", "- services.yaml"),
        ("kubernetes/base/kustomization.yaml", "name: pilotflame-gateway", "name: pilotflame-gate"),
        ("kubernetes/base/statefulset.yaml", "containerPort: 8600", "containerPort: http"),
        ("kubernetes/base/statefulset.yaml", "kind: StatefulSet", "kind: StatefullSet"),
        ("kubernetes/overlays/gpu/kustomization.yaml", "limits/memory", "limit/memory"),
        ("kubernetes/overlays/gpu/kustomization.yaml", "spec/tolerations", "spec/toleration"),
        ("kubernetes/overlays/gpu/kustomization.yaml", "name: pilotflame\n", "name: pilotlight\n"),
        # Kubernetes has `sleep` since 1.29, and the manifests are also for 1.28.
        (
            "kubernetes/base/statefulset.yaml",
            'exec:\n                command: [sleep, "5"]',
            "sleep:\n                seconds: 5",
        ),
        ("compose/alertmanager.yml", "receiver: operators", "receivers: operators"),
        ("systemd/engine.conf", "SupplementaryGroups=docker", "SupplementaryGroup=docker"),
        ("knative/service.yaml", "path: /readyz", "pfad: /readyz"),
        ("knative/service.yaml", 'min-scale: "0"', "min-scale: 0"),
        ("keda/scaledobject.yaml", "query: sum(", "query: sum(("),
        ("keda/scaledobject.yaml", 'threshold: "4"', "threshold: 4"),
        ("systemd/pilotflame.service", "KillMode=mixed", "KillMode=mixd"),
        ("prometheus/rules.yaml", "by (function)", "bye (function)"),
        ("grafana/pilotflame.json", "sum by", "sum bye"),
    ],
)
def test_a_wrong_value_is_found(copy: Path, name: str, right: str, wrong: str) -> None:
    text = (INFRA / name).read_text()
    assert right in text
    (copy / name).write_text(text.replace(right, wrong))
    assert list(check.problems(copy / name))


@pytest.mark.skipif(not check.PROMTOOL, reason="promtool is not here; .ci/run fetches it (PROMTOOL)")
def test_an_alert_that_fires_too_early_is_found(copy: Path) -> None:
    rules = copy / "prometheus/rules.yaml"
    rules.write_text(rules.read_text().replace("for: 2m", "for: 0m"))
    assert "PilotflameDown" in next(check.problems(copy / "prometheus/rules_test.yaml"))


def test_the_command_says_what_is_wrong(copy: Path) -> None:
    path = copy / "keda/http.yaml"
    path.write_text(path.read_text().replace("minReplicaCount", "minReplicas"))
    done = subprocess.run(
        [sys.executable, INFRA / "check.py", copy], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "keda/http.yaml: spec.minReplicas: Extra inputs are not permitted" in done.stdout


# -- metrics

HANDLER = """
import os
def handler(event):
    if event.get("die"):
        os._exit(3)
    return event
"""


def named_metrics() -> dict[str, set[str]]:
    """Return the metrics that rules, the dashboard and KEDA name, with the labels that they must have."""
    queries: list[tuple[str, str]] = []
    for group in yaml.safe_load((INFRA / "prometheus/rules.yaml").read_text())["groups"]:
        queries += [(rule["expr"], " ".join(rule["annotations"].values())) for rule in group["rules"]]
    for panel in json.loads((INFRA / "grafana/pilotflame.json").read_text())["panels"]:
        queries += [(target["expr"], target.get("legendFormat", "")) for target in panel["targets"]]
    for trigger in yaml.safe_load((INFRA / "keda/scaledobject.yaml").read_text())["spec"]["triggers"]:
        queries.append((trigger["metadata"]["query"], ""))
    named: dict[str, set[str]] = {}
    for query, legend in queries:
        for name, labels in observability.metrics_of(query):
            named.setdefault(name, set()).update(labels | observability.labels_of(legend))
    return named


# Metrics that have no samples without an event source, a remote snapshot or a fault of the gateway.
WITHOUT_SAMPLES = {
    "pilotflame_source_messages", "pilotflame_background_failures", "pilotflame_snapshot_received_bytes",
    "pilotflame_snapshot_cache_bytes", "pilotflame_snapshot_cache_budget_bytes", "pilotflame_function_stopped",
}  # fmt: skip


async def after_traffic() -> list[Metric]:
    """Return the metrics of a gateway after calls, a refusal, the death of a worker, and a job whose webhook fails."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", webhook_networks=("127.0.0.0/8",)) as gateway:
            function = await gateway.deploy(HANDLER)
            assert await function.answer({"n": 1}) == {"n": 1}
            assert (await function.error({"die": True}))["type"] == "worker_died"
            late = await function.error({}, X_Request_Timeout="0.000001")
            assert late["status"] in {503, 504}
            job = {"input": {}, "webhook": "http://127.0.0.1:9/closed"}
            submitted = await gateway.client.post(f"/v2/{function.name}/run", json=job)
            assert submitted.status_code == 200, submitted.text
            text = ""

            async def attempted() -> bool:
                nonlocal text
                text = (await gateway.client.get("/metrics")).text
                died = re.search(r'pilotflame_worker_deaths_total{function="[^"]+"} 1.0', text)
                return bool(died) and "pilotflame_webhook_attempts_total{" in text

            await until(attempted, "an attempt to deliver, and the death of the worker")
    return list(text_string_to_metric_families(text))


async def test_rules_dashboard_and_keda_name_metrics_that_a_gateway_has() -> None:
    families = {family.name: family for family in await after_traffic()}
    named = named_metrics()
    assert named.pop("up") == {"job", "instance"}
    for name, labels in named.items():
        family = families.get(name) or families.get(re.sub("_(bucket|sum|count|total)$", "", name))
        assert family is not None, f"a gateway has no metric {name}"
        given = [sample.labels.keys() for sample in family.samples if sample.name == name]
        assert bool(given) != (family.name in WITHOUT_SAMPLES), name
        for found in given:
            assert labels <= {*found, "instance", "job"}, name
