"""What of ours stands in the way of whose requests; the cluster's own pods must never meet it."""

from typing import Any

import pytest

from tidegate_contract import keys

PLAIN = {"k8s-app": "kube-dns"}
OPTED_IN = {keys.POLICY_LABEL: "default"}
WIDE = {
    "matchLabels": {"team": "a"},
    "matchExpressions": [{"key": "tier", "operator": "In", "values": ["gpu"]}],
}


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Says whether a label selector matches, for the operators the chart uses."""
    wanted = [(key, "In", [value]) for key, value in selector.get("matchLabels", {}).items()] + [
        (e["key"], e["operator"], e.get("values")) for e in selector.get("matchExpressions", [])
    ]
    judged = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, values: key in labels,
    }
    return all(judged[operator](key, values) for key, operator, values in wanted)


def namespace(name: str, **labels: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": name, **labels}


REACH: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str], bool]] = {
    "opted-in pod of a team": ({}, OPTED_IN, namespace("team-a"), True),
    "other pod of a team": ({}, PLAIN, namespace("team-a"), False),
    "opted-in pod of the cluster": ({}, OPTED_IN, namespace("kube-system"), False),
    "opted-in pod beside the gate": ({}, OPTED_IN, namespace("tidegate-system"), False),
    "namespace asked for": (WIDE, OPTED_IN, namespace("a", team="a", tier="gpu"), True),
    "namespace not asked for": (WIDE, OPTED_IN, namespace("b", team="b", tier="gpu"), False),
    "the cluster's, asked for": (
        WIDE,
        OPTED_IN,
        namespace("kube-system", team="a", tier="gpu"),
        False,
    ),
}


@pytest.mark.parametrize(("chosen", "pod", "place", "want"), REACH.values(), ids=REACH.keys())
def test_injection_reaches_opted_in_pods_only(
    render: Any, chosen: dict[str, Any], pod: dict[str, str], place: dict[str, str], want: bool
) -> None:
    rendered = render(webhooks={"injection": {"namespaceSelector": chosen}})
    (webhook,) = rendered.of_kind("MutatingWebhookConfiguration")["tidegate-inject"]["webhooks"]
    (rule,) = webhook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE"])
    reached = matches(webhook["objectSelector"], pod) and matches(
        webhook["namespaceSelector"], place
    )
    assert reached is want


def test_injection_fails_open_and_fast(defaults: Any) -> None:
    (webhook,) = defaults.of_kind("MutatingWebhookConfiguration")["tidegate-inject"]["webhooks"]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["timeoutSeconds"] == 3
    assert (webhook["sideEffects"], webhook["reinvocationPolicy"]) == ("None", "IfNeeded")


def test_eviction_webhook_fails_open_and_spares_the_cluster(defaults: Any) -> None:
    (webhook,) = defaults.of_kind("ValidatingWebhookConfiguration")["tidegate-evict"]["webhooks"]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["sideEffects"] == "NoneOnDryRun"
    (rule,) = webhook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods/eviction"], ["CREATE"])
    (condition,) = webhook["matchConditions"]
    want = "!(request.namespace in ['kube-system', 'tidegate-system'])"
    assert condition["expression"] == want


def test_admission_policies_meet_our_labels_or_our_accounts_only(defaults: Any) -> None:
    policies = defaults.of_kind("ValidatingAdmissionPolicy")
    assert set(policies) == set(defaults.of_kind("ValidatingAdmissionPolicyBinding"))
    for name, policy in policies.items():
        selector = policy["spec"]["matchConstraints"].get("objectSelector", {})
        conditions = [c["expression"] for c in policy["spec"].get("matchConditions", [])]
        ours = "request.userInfo.username == 'system:serviceaccount:tidegate-system:tidegate-"
        by_us = any(
            condition.startswith(ours) and "||" not in condition for condition in conditions
        )
        assert by_us or not matches(selector, PLAIN), name


def test_admission_policies_name_the_accounts_of_the_release_namespace(render: Any) -> None:
    text = render(namespace="elsewhere").text
    for account in ("tidegate-gate", "tidegate-controller"):
        assert f"'system:serviceaccount:elsewhere:{account}'" in text
    assert "tidegate-system" not in text
