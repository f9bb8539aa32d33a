"""Raw objects of the API server → the slim records that the gate keeps, and back. Pure.

The caches hold these for every pod of the cluster, so they keep only what some decision reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tidegate_contract import keys
from tidegate_contract.document import encode
from tidegate_contract.wire import Policy
from tidegate_operator.api import CheckpointPolicy, parse_policy
from tidegate_operator.api_run import CheckpointRun, parse_run
from tidegate_operator.api_run_status import DurableStatus, NodeDrain
from tidegate_operator.api_types import ConditionStatus
from tidegate_operator.effective import build_wire_policy, policy_digest
from tidegate_operator.gate.facts import Drain, Durable, PodFacts
from tidegate_operator.gate.injected import Injected, parse_injected
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.times import parse_time

HELD_CONDITION = "Held"
PDB_CONFLICT = "PDBConflict"
UNFINISHED = frozenset({None, "Requested", "Saving"})
"""Results of `status.saveRequest` after which the request is still open."""

CORDON_TAINT = "node.kubernetes.io/unschedulable"
DRAIN_TAINTS = frozenset(
    {
        CORDON_TAINT,
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "medik8s.io/drain",
        "remediator.kubernetes.azure.com/unschedulable",
    }
)
"""What drainers put on a node before they evict its pods."""

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """A pod with the opt-in label.

    Attributes:
        key: namespace and name.
        run: of the pod; None when it was not injected.
        facts: what the hold looks at.
        policy: name of the policy it names.
        injected: the note of its injection; None when it has none.
        place: workload and completion index, the same for its replacement; empty when it has none.
    """

    key: Key
    run: Key | None
    facts: PodFacts
    policy: str
    injected: Injected | None
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node.

    Attributes:
        name, uid: of the node.
        is_draining: whether it is cordoned or a drainer marked it.
        marked_at: UTC of the oldest such mark that carries a time; None when none does.
    """

    name: str
    uid: str
    is_draining: bool
    marked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """A CheckpointPolicy and what pods get of it.

    Attributes:
        policy: the object.
        wire: what trainer and sidecar work by.
        document: `wire` as the environment carries it.
        digest: of `wire`.
    """

    policy: CheckpointPolicy
    wire: Policy
    document: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A CheckpointRun.

    Attributes:
        run: the object.
        observed: what an apply needs of the raw object: metadata and status.
        drains: of its status.
        durable: of its status; None while nothing is durable.
        is_conflicted: another disruption budget matches its pods.
        save_value: `spec.saveRequest` while it is open; empty otherwise.
        save_set_at: UTC when it was set, as the API server noted it; None when it did not.
    """

    run: CheckpointRun
    observed: Object = field(compare=False)
    drains: tuple[Drain, ...] = ()
    durable: Durable | None = None
    is_conflicted: bool = False
    save_value: str = ""
    save_set_at: datetime | None = None

    @property
    def version(self) -> int:
        """The resourceVersion, which grows with each write."""
        return int(self.run.metadata.resource_version or 0)


def slim_pod(raw: Object) -> PodRecord:
    """The record of a pod as the API server serves it."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    namespace, phase = metadata.get("namespace", ""), status.get("phase")
    injected = parse_injected(annotations)
    run = labels.get(keys.RUN_LABEL) if injected else None
    index = labels.get(keys.JOB_INDEX_LABEL)
    return PodRecord(
        key=Key(namespace, metadata["name"]),
        run=Key(namespace, run) if run else None,
        facts=PodFacts(
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            node=raw["spec"].get("nodeName") or "",
            is_running=phase == "Running",
            is_over=phase in ("Succeeded", "Failed"),
            is_terminating="deletionTimestamp" in metadata,
            has_hold=labels.get(keys.HOLD_LABEL) == keys.HOLD_VALUE,
        ),
        policy=labels.get(keys.POLICY_LABEL, ""),
        injected=injected,
        place=place_of(labels) if index is not None else "",
    )


def place_of(labels: Mapping[str, str]) -> str:
    """Workload and completion index of a pod; empty when it has no index."""
    index = labels.get(keys.JOB_INDEX_LABEL)
    return "" if index is None else f"{labels.get(keys.JOB_NAME_LABEL, '')}/{index}"


def slim_node(raw: Object) -> NodeRecord:
    """The record of a node as the API server serves it."""
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    taints = [one for one in spec.get("taints") or () if one.get("key") in DRAIN_TAINTS]
    times = [parse_time(one.get("timeAdded")) for one in taints]
    return NodeRecord(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        is_draining=bool(spec.get("unschedulable")) or bool(taints),
        marked_at=min((time for time in times if time), default=None),
    )


def slim_policy(raw: Object) -> PolicyRecord:
    """The record of a CheckpointPolicy.

    Raises:
        Reject: a field is missing or bad; the sentence names it.
    """
    policy = parse_policy(raw)
    wire = build_wire_policy(policy.spec)
    return PolicyRecord(
        policy=policy,
        wire=wire,
        document=encode(wire).decode().rstrip("\n"),
        digest=policy_digest(wire),
    )


def slim_run(raw: Object) -> RunRecord:
    """The record of a CheckpointRun.

    Raises:
        Reject: a field is missing or bad; the sentence names it.
    """
    run = parse_run(raw)
    status, asked = run.status, run.spec.save_request or ""
    answered = status.save_request
    is_open = answered is None or answered.value != asked or answered.result in UNFINISHED
    return RunRecord(
        run=run,
        observed={"metadata": raw["metadata"], "status": raw.get("status") or {}},
        drains=tuple(_parse_drain(drain) for drain in status.drains),
        durable=_durable(status.last_durable),
        is_conflicted=any(
            (one.type, one.status, one.reason)
            == (HELD_CONDITION, ConditionStatus.FALSE, PDB_CONFLICT)
            for one in status.conditions
        ),
        save_value=asked if is_open else "",
        save_set_at=_save_set_at(raw["metadata"]),
    )


def _save_set_at(metadata: Object) -> datetime | None:
    times = [
        parse_time(note.get("time"))
        for note in metadata.get("managedFields") or ()
        if _names_save_request(note.get("fieldsV1"))
    ]
    return max((time for time in times if time), default=None)


def _names_save_request(fields: Any) -> bool:
    # Users may write these notes, so nothing is sure of their form.
    spec = fields.get("f:spec") if isinstance(fields, Mapping) else None
    return isinstance(spec, Mapping) and "f:saveRequest" in spec


def build_drains(drains: Sequence[Drain]) -> list[dict[str, Any]]:
    """`status.drains` as an apply writes it; `slim_run` reads it back."""
    return [
        NodeDrain(
            node=drain.node,
            node_uid=drain.node_uid,
            state=drain.state,
            reason=drain.reason,
            requested_by=drain.requested_by[:256],
            requested_time=drain.requested_at,
            deadline=drain.deadline,
            released_time=drain.released_at,
            message=drain.message,
        ).to_wire()
        for drain in drains
    ]


def _parse_drain(drain: NodeDrain) -> Drain:
    # Only the gate writes these, always whole; a person's edit may still have left one out.
    requested = drain.requested_time or drain.deadline or drain.released_time
    if requested is None:
        requested = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    return Drain(
        node=drain.node,
        node_uid=drain.node_uid or "",
        state=drain.state,
        reason=drain.reason or "",
        requested_by=drain.requested_by or "",
        requested_at=requested,
        deadline=drain.deadline or requested,
        released_at=drain.released_time,
        message=drain.message or "",
    )


def _durable(status: DurableStatus | None) -> Durable | None:
    if status is None or status.step is None or status.time is None:
        return None
    return Durable(step=status.step, nonce=status.attempt or "", at=status.time)
