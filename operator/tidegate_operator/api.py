"""CheckpointPolicy: its status, its columns and how it is read.

Owns the kind as a whole; its spec is `tidegate_operator.api_spec`. The controller alone writes the
status. Decides nothing and talks to no API server.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tidegate_operator.api_rules import ListMap
from tidegate_operator.api_spec import PolicySpec
from tidegate_operator.api_types import (
    CREATED,
    READY_REASON,
    READY_STATUS,
    ApiModel,
    Column,
    Condition,
    Count32,
    Count64,
    Resource,
    ServedObject,
    Text16,
    Text63,
    Text253,
    Text256,
    parse_object,
)


class EffectivePolicy(ApiModel):
    """What holds once the installation's tiers and limits are applied."""

    local_tier: Text63 | None = None
    """Name of the local tier in use."""
    remote: Text256 | None = None
    """The remote tier in use, as in claim/pfs or tier/pfs."""
    max_hold: Text16 | None = None
    """Longest time one drain may hold a node, as in 10m."""
    on_deadline: Text16 | None = None
    """What happens at the end of maxHold: Release or Block."""


class PolicyRuns(ApiModel):
    """Counts of the runs under a policy."""

    active: Count32 | None = None
    """Runs that have pods now."""
    total: Count32 | None = None
    """Runs that have an object."""


class PolicyPods(ApiModel):
    """Counts of the pods that name a policy."""

    injected: Count32 | None = None
    """Pods that carry the sidecar."""
    missed: Count32 | None = None
    """Pods that name the policy and carry no sidecar."""


class MissedPod(ApiModel):
    """A pod that names the policy and carries no sidecar."""

    name: Text253
    """Name of the pod."""
    reason: Text256 | None = None
    """Why it was missed, in at most 256 characters."""


class PolicyStatus(ApiModel):
    """What the controller found; no one else writes it."""

    observed_generation: Count64 | None = None
    """Generation of the spec that this status was derived from."""
    effective: EffectivePolicy | None = None
    """What holds once the installation's tiers and limits are applied."""
    runs: PolicyRuns | None = None
    """Counts of the runs under this policy."""
    pods: PolicyPods | None = None
    """Counts of the pods that name this policy."""
    missed_pods: Annotated[tuple[MissedPod, ...], Field(max_length=10), ListMap(keys=("name",))] = (
        Field(default_factory=tuple)
    )
    """Pods that name this policy and carry no sidecar, at most 10."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8), ListMap(keys=("type",))] = (
        Field(default_factory=tuple)
    )
    """Accepted, Injecting and the summary Ready; at most 8."""


class CheckpointPolicy(ServedObject):
    """How training runs of a namespace save, copy, restore, and meet drains of their nodes."""

    RESOURCE: ClassVar[Resource] = Resource(
        kind="CheckpointPolicy",
        plural="checkpointpolicies",
        singular="checkpointpolicy",
        short_name="cpol",
        columns=(
            Column(name="Remote", type="string", path=".status.effective.remote"),
            Column(name="Runs", type="integer", path=".status.runs.total"),
            Column(name="Pods", type="integer", path=".status.pods.injected"),
            Column(name="Missed", type="integer", path=".status.pods.missed"),
            Column(name="Ready", type="string", path=READY_STATUS),
            Column(name="Reason", type="string", path=READY_REASON),
            Column(name="Age", type="date", path=CREATED),
        ),
    )

    spec: PolicySpec
    """What every run under this policy does."""
    status: PolicyStatus = Field(default_factory=PolicyStatus)
    """What the controller found."""


def parse_policy(raw: Mapping[str, Any]) -> CheckpointPolicy:
    """Reads a CheckpointPolicy as the API server serves it; fields it does not know are ignored.

    Raises:
        Reject: A field is missing or bad; the sentence names it by its YAML path.
    """
    return parse_object(CheckpointPolicy, raw)
