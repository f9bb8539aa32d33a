"""What the controller knows: slim records of the cluster's objects, and the facts of one decision.

Owns how a raw object becomes a record. Pure. Read by every other module of the controller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tidegate_contract import keys
from tidegate_operator.api import CheckpointPolicy
from tidegate_operator.api_run import CheckpointRun
from tidegate_operator.controller.pdb import Budget, budget_name
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.times import parse_time

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod that carries the opt-in label.

    Attributes:
        key: namespace and name.
        uid: of the pod.
        labels: all of them; disruption budgets select by them.
        node: empty until it is bound.
        phase: as the API has it.
        is_injected: whether the gate left its note.
        is_terminating: whether it was deleted.
        is_nameless: whether nothing could name its run at admission but the label.
        created, started: UTC; `started` is when the kubelet took it, None before.
    """

    key: Key
    uid: str
    labels: Mapping[str, str]
    node: str = ""
    phase: str = "Pending"
    is_injected: bool = False
    is_terminating: bool = False
    is_nameless: bool = False
    created: datetime | None = None
    started: datetime | None = None

    @property
    def policy(self) -> Key:
        """The policy it names."""
        return Key(self.key.namespace, self.labels.get(keys.POLICY_LABEL, ""))

    @property
    def run(self) -> Key | None:
        """The run it belongs to; None when neither a user nor the gate named one."""
        name = self.labels.get(keys.RUN_LABEL)
        return Key(self.key.namespace, name) if name else None

    @property
    def is_live(self) -> bool:
        """Whether its containers may still run."""
        return self.phase not in ("Succeeded", "Failed")

    @property
    def is_bound(self) -> bool:
        """Whether it is live and a node was chosen."""
        return bool(self.node) and self.is_live

    @property
    def is_running(self) -> bool:
        """Whether its containers run now."""
        return self.phase == "Running"

    @property
    def is_held(self) -> bool:
        """Whether it carries the hold label."""
        return self.labels.get(keys.HOLD_LABEL) == keys.HOLD_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node.

    Attributes:
        last_durable: our annotation as it stands; None when there is none.
    """

    last_durable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that decides about one run.

    Attributes:
        key: of the run.
        run: None when there is no object.
        pods: that carry the run's label, ordered by name.
        policy: None when there is none, or it cannot be read.
        budgets: all disruption budgets of the namespace, its own too.
    """

    key: Key
    run: CheckpointRun | None
    pods: tuple[Pod, ...] = ()
    policy: CheckpointPolicy | None = None
    budgets: tuple[Budget, ...] = ()

    @property
    def live_pods(self) -> tuple[Pod, ...]:
        """Pods whose containers may still run, and that carry the sidecar."""
        return tuple(pod for pod in self.pods if pod.is_live and pod.is_injected)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNote:
    """What is remembered of a run between its own passes, for its policy and its nodes.

    Attributes:
        policy: that it is under.
        durable_time: of its newest durable step; None when nothing is durable.
        is_active: whether it has live pods.
    """

    policy: Key
    durable_time: datetime | None = None
    is_active: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """All that decides about one policy.

    Attributes:
        policy: the policy.
        created: UTC.
        pods: that name it.
        runs: that are under it.
        missing_claim: name of the remote claim when the namespace has none such.
    """

    policy: CheckpointPolicy
    created: datetime | None = None
    pods: tuple[Pod, ...] = ()
    runs: tuple[RunNote, ...] = field(default_factory=tuple)
    missing_claim: str | None = None


def slim_pod(raw: Object) -> Pod:
    """The record of a pod as the API server serves it."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    return Pod(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        labels=labels,
        node=raw["spec"].get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        is_injected=keys.INJECTED_ANNOTATION in (metadata.get("annotations") or {}),
        is_terminating="deletionTimestamp" in metadata,
        is_nameless="generateName" in metadata
        and not labels.keys() & {keys.RUN_LABEL, keys.JOBSET_NAME_LABEL, keys.JOB_NAME_LABEL},
        created=parse_time(metadata.get("creationTimestamp")),
        started=parse_time(status.get("startTime")),
    )


def slim_node(raw: Object) -> Node:
    """The record of a node as the API server serves it."""
    annotations = raw["metadata"].get("annotations") or {}
    return Node(last_durable=annotations.get(keys.LAST_DURABLE_ANNOTATION))


def slim_budget(raw: Object) -> Budget:
    """The record of a disruption budget as the API server serves it."""
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    labels = metadata.get("labels") or {}
    run = labels.get(keys.RUN_LABEL, "")
    is_ours = labels.get(keys.MANAGED_BY_LABEL) == keys.MANAGED_BY and metadata[
        "name"
    ] == budget_name(run)
    return Budget(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        run=run if is_ours else "",
        selector=spec.get("selector"),
        min_available=spec.get("minAvailable"),
        eviction_policy=spec.get("unhealthyPodEvictionPolicy"),
    )
