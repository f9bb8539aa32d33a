"""The rights of our accounts, as a table; a right that is not in it is a finding."""

from typing import Any

import pytest

READ = "get list watch"
RUNS = "tidegate.io/checkpointruns"
POLICIES = "tidegate.io/checkpointpolicies"
ADMISSION = "admissionregistration.k8s.io"

CLUSTER = {
    "tidegate-controller": {
        POLICIES: READ,
        RUNS: f"{READ} create delete",
        f"{POLICIES}/status": "patch",
        f"{RUNS}/status": "patch",
        "pods": READ,
        "policy/poddisruptionbudgets": f"{READ} create patch delete",
        "nodes": f"{READ} patch",
        "limitranges": READ,
        "persistentvolumeclaims": READ,
        "apiextensions.k8s.io/customresourcedefinitions": "list watch",
        "events.k8s.io/events": "create patch",
        f"{ADMISSION}/mutatingwebhookconfigurations tidegate-inject": "get patch delete",
        f"{ADMISSION}/validatingwebhookconfigurations tidegate-evict": "get patch delete",
        "rbac.authorization.k8s.io/clusterroles tidegate-anchor": "get patch delete",
        "namespaces tidegate-system": "get",
    },
    "tidegate-gate": {
        POLICIES: READ,
        RUNS: f"{READ} release",
        f"{RUNS}/status": "patch",
        "pods": f"{READ} patch",
        "nodes": READ,
        "policy/poddisruptionbudgets": READ,
        "authentication.k8s.io/tokenreviews": "create",
        "events.k8s.io/events": "create patch",
    },
    "tidegate-agent": {"pods": READ},
}
NAMESPACED: dict[str, dict[str, str]] = {
    "tidegate-controller": {
        "coordination.k8s.io/leases": "create",
        "coordination.k8s.io/leases tidegate-controller": "get patch",
        "secrets tidegate-gate-tls": "get patch",
    },
    "tidegate-gate": {
        "secrets tidegate-gate-tls": "watch",
        "services tidegate-gate": "get watch",
    },
    "tidegate-agent": {},
}
AGGREGATED = {
    "view": {POLICIES: READ, RUNS: READ},
    "edit": {
        POLICIES: "create update patch delete deletecollection",
        RUNS: "create update patch delete deletecollection",
    },
}


def flatten(rules: list[dict[str, Any]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    key = f"{group}/{resource}".removeprefix("/") + (f" {name}" if name else "")
                    found.setdefault(key, set()).update(rule["verbs"])
    return found


def rights_of(rendered: Any, account: str, binding_kind: str) -> dict[str, set[str]]:
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "tidegate-system"}
    roles = {kind: rendered.of_kind(kind) for kind in ("ClusterRole", "Role")}
    rules: list[dict[str, Any]] = []
    for binding in rendered.of_kind(binding_kind).values():
        if subject in binding["subjects"]:
            rules += roles[binding["roleRef"]["kind"]][binding["roleRef"]["name"]]["rules"]
    return flatten(rules)


def as_sets(table: dict[str, str]) -> dict[str, set[str]]:
    return {key: set(verbs.split()) for key, verbs in table.items()}


@pytest.mark.parametrize("account", CLUSTER)
def test_account_has_the_rights_of_the_table(defaults: Any, account: str) -> None:
    assert rights_of(defaults, account, "ClusterRoleBinding") == as_sets(CLUSTER[account])
    assert rights_of(defaults, account, "RoleBinding") == as_sets(NAMESPACED[account])


@pytest.mark.parametrize("role", AGGREGATED)
def test_tenants_of_role_get_the_rights_of_the_table(defaults: Any, role: str) -> None:
    label = f"rbac.authorization.k8s.io/aggregate-to-{role}"
    roles = [
        found
        for found in defaults.of_kind("ClusterRole").values()
        if found["metadata"]["labels"].get(label) == "true"
    ]
    assert [flatten(found["rules"]) for found in roles] == [as_sets(AGGREGATED[role])]


def test_every_role_is_in_a_table(defaults: Any) -> None:
    tenants = {f"tidegate-{role}" for role in AGGREGATED}
    assert set(defaults.of_kind("ClusterRole")) == {*CLUSTER, *tenants, "tidegate-anchor"}
    assert set(defaults.of_kind("Role")) == {a for a, rights in NAMESPACED.items() if rights}


def test_anchor_grants_nothing(defaults: Any) -> None:
    assert defaults.of_kind("ClusterRole")["tidegate-anchor"]["rules"] == []


def test_accounts_are_those_of_the_pods(defaults: Any) -> None:
    workloads = defaults.of_kind("Deployment") | defaults.of_kind("DaemonSet")
    used = {w["spec"]["template"]["spec"]["serviceAccountName"] for w in workloads.values()}
    assert used == set(defaults.of_kind("ServiceAccount")) == set(CLUSTER)


def test_rights_disabled_leaves_the_anchor_alone(render: Any) -> None:
    rendered = render(rbac={"create": False})
    assert set(rendered.of_kind("ClusterRole")) == {"tidegate-anchor"}
    assert not rendered.of_kind("ClusterRoleBinding") and not rendered.of_kind("Role")
