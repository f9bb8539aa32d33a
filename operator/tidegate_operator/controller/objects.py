"""The objects that the controller makes: runs, hold budgets, owner references. Pure."""

from dataclasses import dataclass
from typing import Any

from tidegate_contract import keys
from tidegate_operator.controller.pdb import ALWAYS_ALLOW, budget_name, build_selector
from tidegate_operator.kube.kinds import PDBS, RUNS, Key, Kind

Object = dict[str, Any]

MANAGER = "tidegate-controller"
"""Field manager of every write of the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """An object that takes others with it when it is deleted.

    Attributes:
        kind: of the owner.
        name: of the owner.
        uid: of the owner.
    """

    kind: Kind
    name: str
    uid: str


def build_run(run: Key, policy: str) -> Object:
    """The object of a run at its first injected pod.

    Args:
        run: namespace and name.
        policy: name of the policy in the same namespace.
    """
    return {
        "apiVersion": RUNS.api_version,
        "kind": RUNS.kind,
        "metadata": {"namespace": run.namespace, "name": run.name},
        "spec": {"policyName": policy},
    }


def build_budget(run: Key, min_available: int, anchor: Owner) -> Object:
    """The hold's disruption budget of a run.

    Args:
        run: namespace and name.
        min_available: pods that may not be evicted.
        anchor: owner whose end removes every budget.
    """
    return {
        "apiVersion": PDBS.api_version,
        "kind": PDBS.kind,
        "metadata": {
            "namespace": run.namespace,
            "name": budget_name(run.name),
            "labels": {keys.MANAGED_BY_LABEL: keys.MANAGED_BY, keys.RUN_LABEL: run.name},
            "ownerReferences": [build_owner(anchor)],
        },
        "spec": build_budget_spec(run.name, min_available),
    }


def build_budget_spec(run: str, min_available: int) -> Object:
    """The spec of a run's budget, whole, so that a patch repairs each part of it.

    Held pods that are not Ready pass it: only the webhook sees those, and a pod that cannot become
    Ready must not trap its node while the gate is away.
    """
    return {
        "minAvailable": min_available,
        "maxUnavailable": None,
        "selector": build_selector(run),
        "unhealthyPodEvictionPolicy": ALWAYS_ALLOW,
    }


def build_owner(owner: Owner) -> Object:
    """An owner reference; never blocking, as that needs rights on the owner's finalizers."""
    return {
        "apiVersion": owner.kind.api_version,
        "kind": owner.kind.kind,
        "name": owner.name,
        "uid": owner.uid,
    }
