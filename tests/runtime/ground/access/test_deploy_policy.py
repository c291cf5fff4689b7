"""What policies allow: the kind of code, images, networks, snapshots, queues and GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.addresses import Addresses
from pilotflame.errors import PolicyViolation
from pilotflame.runtime.ground.access.deploy_policy import DeployPolicies, DeployPolicy
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.snapshot.sources.access import ANY, Access

QUEUE = "https://sqs.eu-west-1.amazonaws.com/000000000000/orders"
TRUSTING = DeployPolicy(kind="trusted")


def function(**settings: Any) -> FunctionSettings:
    return FunctionSettings.model_validate({"name": "f", **settings})


def contained(**settings: Any) -> FunctionSettings:
    return function(image={"name": "registry/team/f:1"}, **settings)


def faults(policy: DeployPolicy, settings: FunctionSettings, **outside: str) -> str:
    return "; ".join(policy.faults(settings, outside))


def test_a_policy_for_trusted_code_allows_everything() -> None:
    source = {"type": "sqs", "queue": QUEUE, "profile": "team"}
    assert faults(TRUSTING, function(source=[source]), weights="/models") == ""
    assert faults(TRUSTING, contained(resources={"network": "host"}), weights="s3://any") == ""
    DeployPolicies(TRUSTING).check_path("")


def test_a_policy_allows_untrusted_code_only_uploaded_and_in_a_container() -> None:
    assert "image.name is not set" in faults(DeployPolicy(), function())
    assert faults(DeployPolicy(), contained()) == ""
    for policies in (DeployPolicies(DeployPolicy()), DeployPolicies(TRUSTING, lambda _key: DeployPolicy())):
        with pytest.raises(PolicyViolation, match="allows no folders of the gateway's machine"):
            policies.check_path("key")


@pytest.mark.parametrize(
    ("settings", "outside", "fault", "allowing"),
    [
        (contained(resources={"network": "bridge"}), {}, "network is 'bridge'", {"networks": ("none", "bridge")}),
        (contained(), {"": "s3://models/f"}, "snapshot is outside the code", {"snapshots": ("s3://models/*",)}),
        (contained(), {"base": "/etc"}, "base.* is outside the code", {"snapshots": ("/etc",)}),
        (contained(source=[{"type": "sqs", "queue": QUEUE}]), {}, "source.queue is 'https", {"queues": (QUEUE,)}),
        (contained(request_log={"store": "s3://logs/f"}), {}, "request_log.store is 's3", {"queues": ("s3://logs/*",)}),
        (contained(resources={"gpus": 2}), {}, "gpus is 2; allowed: at most 1", {"gpus": 2}),
        (contained(resources={"memory_mb": 200}), {}, "memory_mb is 200; allowed: at most 100", {"memory_mb": 200}),
        (contained(resources={"cpus": 2.0}), {}, "cpus is 2.0; allowed: at most 1.0", {"cpus": 2.0}),
        (contained(), {}, "cpus is not set, which means all", {"cpus": None}),
        (contained(), {}, "gpus is not set, which means all", {"gpus": None}),
        (contained(), {}, "image.name is 'registry/team/f:1'; allowed: other/", {"images": ("registry/team/*",)}),
    ],
)  # fmt: skip
def test_what_the_owner_has_not_listed_is_refused(
    settings: FunctionSettings, outside: dict[str, str], fault: str, allowing: dict[str, Any]
) -> None:
    policy = DeployPolicy()
    for name, most in (("gpus", 1), ("memory_mb", 100), ("cpus", 1.0)):
        if name in allowing:
            policy = DeployPolicy.model_validate({name: most})
    if "images" in allowing:
        policy = DeployPolicy(images=("other/*",))
    with pytest.raises(AssertionError, match=fault):
        assert faults(policy, settings, **outside) == ""
    assert faults(DeployPolicy(**allowing), settings, **outside) == ""


def test_temporary_files_of_untrusted_code_have_a_limit() -> None:
    settings = contained(resources={"tmp_mb": 1 << 20})
    assert "resources.tmp_mb is 1048576; allowed: at most 4096" in faults(DeployPolicy(), settings)
    assert faults(TRUSTING, settings) == ""


def test_the_result_endpoint_and_profile_of_a_queue_have_to_be_allowed_too() -> None:
    more = {"result": "s3://results/f", "endpoint_url": "http://10.0.0.1", "profile": "owner"}
    settings = contained(source=[{"type": "sqs", "queue": QUEUE, **more}])
    found = faults(DeployPolicy(queues=(QUEUE,)), settings)
    for key in ("result", "endpoint_url", "profile"):
        assert f"source.{key} is" in found
    assert faults(DeployPolicy(queues=(QUEUE, *more.values())), settings) == ""


def test_a_request_log_of_untrusted_code_is_in_no_folder_of_the_machine() -> None:
    settings, every = contained(request_log={"store": "/var/logs"}), ("*", "/var/logs")
    found = faults(DeployPolicy(queues=every), settings)
    assert found == "request_log.store is '/var/logs'; allowed: no folder of the gateway's machine"
    assert faults(DeployPolicy(kind="trusted", queues=("/var/*",)), settings) == ""


def test_the_place_in_a_setting_of_a_plugin_has_to_be_allowed_by_both_policies() -> None:
    keys = {"narrow": DeployPolicy(queues=("s3://answers/*",)), "closed": DeployPolicy()}
    policies = DeployPolicies(TRUSTING, keys.get)
    for allowed, key in (("s3://any/f", ""), ("s3://answers/f", "narrow")):
        policies.check_place("env.X", allowed, key)
    for refused, key in (
        ("s3://any/f", "narrow"),
        ("s3://answers/../f", "narrow"),
        ("s3://answers/f", "closed"),
    ):
        with pytest.raises(PolicyViolation, match=r"does not allow the place in env\.X"):
            policies.check_place("env.X", refused, key)
    with pytest.raises(PolicyViolation):
        DeployPolicies(DeployPolicy(), keys.get).check_place("env.X", "s3://answers/f", "narrow")


@pytest.mark.parametrize(
    "url",
    ["s3://models/../secret", "https://h/models/%2e%2e/secret", "/models/..", "..", "s3://models/a\\..\\b"],
)
def test_a_path_that_steps_up_fits_no_pattern(url: str) -> None:
    policy = DeployPolicy(snapshots=("s3://models/*", "https://h/models/*", "/models/*", "..*"))
    assert "outside the code" in faults(policy, contained(), weights=url)


@pytest.mark.parametrize(
    ("pattern", "address"),
    [
        ("https://*.corp.example/*", "https://evil.example/x.corp.example/y"),
        ("https://host*", "https://host:80@evil/x"),
        ("/models/team?/*", "/models/teamX/a"),
        ("/models/[ab]", "/models/a"),
    ],
)
def test_a_star_does_not_leave_the_host_and_nothing_else_is_special(pattern: str, address: str) -> None:
    policy = DeployPolicy(snapshots=(pattern,))
    assert "outside the code" in faults(policy, contained(), weights=address)
    assert faults(policy, contained(), weights=pattern.replace("*", "a")) == ""


def test_a_message_does_not_show_the_url_of_a_snapshot() -> None:
    assert "hidden" not in faults(DeployPolicy(), contained(), weights="https://user:hidden@h/w")


def test_a_function_has_to_satisfy_the_gateway_s_policy_and_the_key_s() -> None:
    keys = {"open": TRUSTING, "narrow": DeployPolicy()}
    policies = DeployPolicies(TRUSTING, keys.get)
    assert policies.fault(function(), {}, "open") == policies.fault(function(), {}, "") == ""
    assert policies.fault(function(), {}, "unknown") == ""
    assert policies.fault(function(), {}, "narrow").startswith(
        "The policy of the API key narrow does not allow f: code"
    )
    with pytest.raises(PolicyViolation, match="API key narrow"):
        policies.check(function(), {}, "narrow")
    closed = DeployPolicies(DeployPolicy(), keys.get)
    for key in ("open", "narrow", ""):
        assert "The policy of the gateway does not allow f" in closed.fault(function(), {}, key)


NAMES = st.sampled_from(["none", "bridge", "host"])


@given(st.lists(NAMES, max_size=3), NAMES, st.integers(0, 3), st.none() | st.integers(0, 3))
def test_a_narrower_policy_allows_nothing_that_a_wider_one_refuses(
    networks: list[str], network: str, gpus: int, most: int | None
) -> None:
    settings = contained(resources={"network": network, "gpus": gpus})
    wide = DeployPolicy.model_validate({"networks": tuple(networks), "gpus": most})
    narrow = wide.model_copy(update={"networks": wide.networks[1:], "gpus": 0})
    if faults(wide, settings):
        assert faults(narrow, settings)


def test_snapshots_of_untrusted_functions_are_fetched_with_their_own_secrets_from_allowed_addresses() -> None:
    here = Addresses.of(["10.0.0.0/8"])
    policies = {"trusted": TRUSTING, "team": DeployPolicy()}
    found = DeployPolicies(TRUSTING, policies.get, ("s3://shared/*",), here, Addresses())
    assert [found.access("s3://any/net", key) for key in ("", "trusted", "unknown")] == [ANY] * 3
    assert found.access("s3://any/net", "team") == Access(own_only=True, addresses=here)
    assert found.access("s3://shared/../any", "team") == Access(own_only=True, addresses=here)
    assert found.access("s3://shared/net", "team") == Access(own_only=False, addresses=here)
    assert (found.queue_access("trusted"), found.queue_access("team")) == (ANY, Access(True, Addresses()))
    strict = DeployPolicies(DeployPolicy(), policies.get)
    for key in ("", "trusted", "team", "unknown"):
        assert strict.access("s3://shared/net", key) == Access(own_only=True, addresses=Addresses())
