"""The kinds of manifests that no package on PyPI describes, as models of the fields that infra/ uses.

Written after the CRDs of Knative Serving 1.19, KEDA 2.18, KEDA's HTTP add-on 0.15 and the Prometheus operator 0.85,
and after the documents of Kustomize and Grafana. A field that is missing here is added when a manifest needs it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Duration = Annotated[str, StringConstraints(pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$")]
Text = Annotated[str, StringConstraints(min_length=1)]
WholeText = Annotated[str, StringConstraints(pattern=r"^[0-9]+$")]


class Strict(BaseModel):
    """A field that the model does not have is an error, and so is a number in place of a text."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class Metadata(Strict):
    name: Text
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


# -- Knative. The pod inside is checked as a Kubernetes pod.


class Autoscaling(Strict):
    """The annotations of a Knative revision's template."""

    min_scale: WholeText | None = Field(None, alias="autoscaling.knative.dev/min-scale")
    max_scale: WholeText | None = Field(None, alias="autoscaling.knative.dev/max-scale")
    metric: Literal["concurrency", "rps", "cpu", "memory", None] = Field(
        None, alias="autoscaling.knative.dev/metric"
    )
    target: WholeText | None = Field(None, alias="autoscaling.knative.dev/target")
    utilization: WholeText | None = Field(None, alias="autoscaling.knative.dev/target-utilization-percentage")
    scale_down_delay: Duration | None = Field(None, alias="autoscaling.knative.dev/scale-down-delay")
    initial_scale: WholeText | None = Field(None, alias="autoscaling.knative.dev/initial-scale")
    activation_scale: WholeText | None = Field(None, alias="autoscaling.knative.dev/activation-scale")
    window: Duration | None = Field(None, alias="autoscaling.knative.dev/window")
    retention: Duration | None = Field(
        None, alias="autoscaling.knative.dev/scale-to-zero-pod-retention-period"
    )


class TemplateMetadata(Strict):
    annotations: Autoscaling


class SecretName(Strict):
    name: Text


class KnativeRevision(Strict):
    container_concurrency: Annotated[int, Field(ge=0, le=1000, alias="containerConcurrency")]
    timeout_seconds: Annotated[int, Field(ge=1, alias="timeoutSeconds")]
    containers: list[dict[str, Any]] = Field(min_length=1, max_length=1)
    volumes: list[dict[str, Any]] = []
    automount_service_account_token: bool = Field(True, alias="automountServiceAccountToken")
    service_account_name: Text | None = Field(None, alias="serviceAccountName")
    image_pull_secrets: list[SecretName] = Field([], alias="imagePullSecrets")


class KnativeTemplate(Strict):
    metadata: TemplateMetadata
    spec: KnativeRevision


class KnativeSpec(Strict):
    template: KnativeTemplate


class KnativeService(Strict):
    api_version: Literal["serving.knative.dev/v1"] = Field(alias="apiVersion")
    kind: Literal["Service"]
    metadata: Metadata
    spec: KnativeSpec


# -- KEDA


class ScaleTarget(Strict):
    name: Text
    kind: Text = "Deployment"
    api_version: Text = Field("apps/v1", alias="apiVersion")


class PrometheusQuery(Strict):
    """The metadata of a trigger: texts, all of them."""

    server_address: Annotated[str, Field(pattern=r"^https?://", alias="serverAddress")]
    query: Text
    threshold: Annotated[str, Field(pattern=r"^[0-9.]+$")]
    activation_threshold: Annotated[str, Field(pattern=r"^[0-9.]+$", alias="activationThreshold")] = "0"
    auth_modes: Literal["basic", "bearer", "tls", None] = Field(None, alias="authModes")
    ignore_null_values: Literal["true", "false"] = Field("true", alias="ignoreNullValues")


class Authentication(Strict):
    name: Text
    kind: Literal["TriggerAuthentication", "ClusterTriggerAuthentication"] = "TriggerAuthentication"


class PrometheusTrigger(Strict):
    type: Literal["prometheus"]
    metadata: PrometheusQuery
    authentication: Authentication | None = Field(None, alias="authenticationRef")


class InterceptorName(Strict):
    scaler_address: Text = Field(alias="scalerAddress")
    interceptor_route: Text = Field(alias="interceptorRoute")


class PushTrigger(Strict):
    type: Literal["external-push"]
    metadata: InterceptorName


class Fallback(Strict):
    failure_threshold: int = Field(ge=0, alias="failureThreshold")
    replicas: int = Field(ge=0)


class ScaleDown(Strict):
    stabilization_window_seconds: int = Field(ge=0, le=3600, alias="stabilizationWindowSeconds")


class Behavior(Strict):
    scale_down: ScaleDown = Field(alias="scaleDown")


class Autoscaler(Strict):
    behavior: Behavior


class Advanced(Strict):
    autoscaler: Autoscaler = Field(alias="horizontalPodAutoscalerConfig")


class ScaledObjectSpec(Strict):
    target: ScaleTarget = Field(alias="scaleTargetRef")
    least: int = Field(ge=0, alias="minReplicaCount")
    most: int = Field(ge=1, alias="maxReplicaCount")
    polling_interval: int = Field(30, ge=1, alias="pollingInterval")
    cooldown_period: int = Field(300, ge=0, alias="cooldownPeriod")
    initial_cooldown_period: int = Field(0, ge=0, alias="initialCooldownPeriod")
    idle_replicas: int | None = Field(None, ge=0, alias="idleReplicaCount")
    fallback: Fallback | None = None
    advanced: Advanced | None = None
    triggers: list[Annotated[PrometheusTrigger | PushTrigger, Field(discriminator="type")]] = Field(
        min_length=1
    )


class ScaledObject(Strict):
    api_version: Literal["keda.sh/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


class RouteTarget(Strict):
    service: Text
    port_name: Text = Field(alias="portName")


class RouteRule(Strict):
    hosts: list[Text]


class Concurrency(Strict):
    target_value: int = Field(ge=1, alias="targetValue")


class ScalingMetric(Strict):
    concurrency: Concurrency


class RouteTimeouts(Strict):
    readiness: Duration | None = None
    request: Duration | None = None
    response_header: Duration | None = Field(None, alias="responseHeader")


class RouteSpec(Strict):
    target: RouteTarget
    rules: list[RouteRule]
    scaling_metric: ScalingMetric = Field(alias="scalingMetric")
    timeouts: RouteTimeouts


class InterceptorRoute(Strict):
    api_version: Literal["http.keda.sh/v1beta1"] = Field(alias="apiVersion")
    kind: Literal["InterceptorRoute"]
    metadata: Metadata
    spec: RouteSpec


# -- the Prometheus operator


class SecretKey(Strict):
    name: Text
    key: Text


class Authorization(Strict):
    type: Literal["Bearer"]
    credentials: SecretKey


class Endpoint(Strict):
    port: Text
    path: Text
    interval: Duration
    scrape_timeout: Duration | None = Field(None, alias="scrapeTimeout")
    scheme: Literal["http", "https"] = "http"
    authorization: Authorization | None = None


class Selector(Strict):
    match_labels: dict[str, str] = Field(alias="matchLabels")


class ServiceMonitorSpec(Strict):
    selector: Selector
    endpoints: list[Endpoint] = Field(min_length=1)


class ServiceMonitor(Strict):
    api_version: Literal["monitoring.coreos.com/v1"] = Field(alias="apiVersion")
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: ServiceMonitorSpec


# -- Kustomize


class Labels(Strict):
    pairs: dict[str, str]
    include_selectors: bool = Field(alias="includeSelectors")


class Image(Strict):
    name: Text
    new_name: Text | None = Field(None, alias="newName")
    new_tag: Text | None = Field(None, alias="newTag")


class PatchTarget(Strict):
    kind: Text
    name: Text


class Patch(Strict):
    """A JSON patch (RFC 6902) as a text in YAML."""

    target: PatchTarget
    patch: Text


class Kustomization(Strict):
    api_version: Literal["kustomize.config.k8s.io/v1beta1"] = Field(alias="apiVersion")
    kind: Literal["Kustomization"]
    resources: list[Text] = Field(min_length=1)
    labels: list[Labels] = []
    images: list[Image] = []
    patches: list[Patch] = []


KINDS: dict[str, type[KnativeService | ScaledObject | InterceptorRoute | ServiceMonitor | Kustomization]] = {
    "serving.knative.dev/Service": KnativeService,
    "keda.sh/ScaledObject": ScaledObject,
    "http.keda.sh/InterceptorRoute": InterceptorRoute,
    "monitoring.coreos.com/ServiceMonitor": ServiceMonitor,
    "kustomize.config.k8s.io/Kustomization": Kustomization,
}
