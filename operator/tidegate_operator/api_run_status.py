"""The status of a CheckpointRun: what is saved, durable and held.

Owns its fields and bounds; the string below each field is what ``kubectl explain`` prints. The gate
reports and the controller derives; `RunStatus` says who writes which field, and each has one
writer. Decides nothing and talks to no API server.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, Field

from tidegate_contract.keys import DrainState
from tidegate_operator.api_rules import ListMap, Rule
from tidegate_operator.api_types import (
    ApiModel,
    Condition,
    Count32,
    Count64,
    Text16,
    Text24,
    Text32,
    Text36,
    Text63,
    Text64,
    Text128,
    Text253,
    Text256,
    Text1024,
)


class RestoreTier(StrEnum):
    """Which tier a restore read."""

    LOCAL = "Local"
    REMOTE = "Remote"
    MIXED = "Mixed"


class RunPhase(StrEnum):
    """What a run does now, in one word for people."""

    PENDING = "Pending"
    RESTORING = "Restoring"
    TRAINING = "Training"
    IDLE = "Idle"
    SILENT = "Silent"
    FINISHED = "Finished"


class LocalCopy(StrEnum):
    """What the nodes hold of one attempt."""

    NONE = "None"
    PARTIAL = "Partial"
    SEALED = "Sealed"


class RemoteCopy(StrEnum):
    """What the remote tier holds of one attempt."""

    NONE = "None"
    IN_FLIGHT = "InFlight"
    DURABLE = "Durable"
    QUARANTINED = "Quarantined"


class StepStatus(ApiModel):
    """Agreed counts of a run at one moment."""

    step: Count64 | None = None
    """Optimizer steps since the run began."""
    tokens: Count64 | None = None
    """Tokens over all ranks since the run began."""
    time: AwareDatetime | None = None
    """When that was, UTC."""


class DurableStatus(StepStatus):
    """The newest step on the remote tier; after a rollback its step may fall, its time never."""

    rules = (
        Rule(
            cel="!has(oldSelf.time) || (has(self.time) && self.time >= oldSelf.time)",
            message="lastDurable.time never goes back",
        ),
    )

    attempt: Text32 | None = None
    """Which try at saving the step it is, at most 32 characters."""
    # Declared again, so that the description says what the time means here.
    time: AwareDatetime | None = None
    """When the step was committed on the remote tier, UTC; no earlier than the value before it and
    never in the future."""
    observed_time: AwareDatetime | None = None
    """When the commit was seen, UTC."""
    path: Text1024 | None = None
    """Folder of the step below the root of the remote tier."""
    size_bytes: Count64 | None = None
    """Bytes of the step on the remote tier."""
    digest: Text128 | None = None
    """SHA-256 of the step's manifest."""


class LastRestore(ApiModel):
    """The newest restore of the run."""

    step: Count64 | None = None
    """Optimizer step that was restored."""
    tier: RestoreTier | None = None
    """Which tier was read: Local, Remote or Mixed."""
    reason: Text256 | None = None
    """Why this step was chosen, in at most 256 characters."""
    time: AwareDatetime | None = None
    """When the restore finished, UTC."""
    attempts: Count32 | None = None
    """Tries at restoring the step, this one included."""
    weights_seconds: Count32 | None = None
    """Seconds until the weights were usable."""
    seconds: Count32 | None = None
    """Seconds until all state was restored."""
    bytes_local: Count64 | None = None
    """Bytes that rank 0 read from its node."""
    bytes_remote: Count64 | None = None
    """Bytes that rank 0 read from the remote tier."""


class Backlog(ApiModel):
    """What is sealed on the nodes and not yet durable."""

    steps: Count32 | None = None
    """Steps waiting for their copy."""
    bytes: Count64 | None = None
    """Bytes waiting for their copy, over all nodes."""
    size: Text24 | None = None
    """The bytes for people, as in 41Gi."""
    oldest_time: AwareDatetime | None = None
    """When the oldest waiting step was sealed, UTC."""


class SaveCounts(ApiModel):
    """Counts and durations of the run's saves since its newest start."""

    total: Count64 | None = None
    """Saves that ended since the trainer last started."""
    failed: Count64 | None = None
    """Saves that failed."""
    stall_p50_ms: Count64 | None = None
    """Median pause of training per save, in milliseconds."""
    stall_p95_ms: Count64 | None = None
    """95th percentile of the pause of training per save, in milliseconds."""
    duration_p50_ms: Count64 | None = None
    """Median time from the start of a save until it was sealed, in milliseconds."""
    duration_p95_ms: Count64 | None = None
    """95th percentile of the time from the start of a save until it was sealed, in milliseconds."""


class NodeDrain(ApiModel):
    """One drain of a node that runs pods of this run."""

    node: Text253
    """Name of the node."""
    node_uid: Text64 | None = None
    """Identity of the node; a new node of the same name is another one."""
    state: DrainState
    """Requested, Saving, Flushing, Released or Exposed; a node without an entry is held."""
    reason: Text64 | None = None
    """Why the state was entered, in one CamelCase word."""
    requested_by: Text256 | None = None
    """User of the first eviction."""
    requested_time: AwareDatetime | None = None
    """When the first eviction came, UTC."""
    deadline: AwareDatetime | None = None
    """Latest time of the release, UTC."""
    released_time: AwareDatetime | None = None
    """When the pods were let go, UTC."""
    message: Text1024 | None = None
    """What is awaited, in one sentence."""


class SaveAnswer(ApiModel):
    """How far spec.saveRequest has come."""

    value: Text64 | None = None
    """The value of spec.saveRequest that is answered."""
    step: Count64 | None = None
    """Optimizer step of the save."""
    result: Text64 | None = None
    """How far the save has come, in one CamelCase word."""


class RunTiers(ApiModel):
    """The tiers pinned at the run's first pod; later pods use the same."""

    local: Text63 | None = None
    """The local tier."""
    remote: Text256 | None = None
    """The remote tier, as in claim/pfs or tier/pfs."""
    path: Text1024 | None = None
    """Folder of the run below the root of the remote tier."""


class RunPods(ApiModel):
    """Counts of the run's pods."""

    expected: Count32 | None = None
    """Pods the run has when complete."""
    running: Count32 | None = None
    """Pods that run now."""
    injected: Count32 | None = None
    """Pods that carry the sidecar."""
    held: Count32 | None = None
    """Pods that may not be evicted now."""


class RestorePoint(ApiModel):
    """What a restart would begin with now."""

    step: Count64 | None = None
    """Optimizer step that would be restored."""
    tier: Text16 | None = None
    """Which tier would be read: Local, Remote or Mixed."""
    reason: Text64 | None = None
    """Why this step, in one CamelCase word."""
    message: Text1024 | None = None
    """Why this step, in one sentence."""


class TierProblem(ApiModel):
    """One tier that one node cannot use as it should."""

    node: Text253
    """Name of the node."""
    tier: Text63
    """Name of the tier."""
    reason: Text64
    """What is wrong, in one CamelCase word."""
    message: Text1024 | None = None
    """What is wrong and what to do, in one sentence."""
    since: AwareDatetime | None = None
    """When it began, UTC."""


class CheckpointStatus(ApiModel):
    """One attempt at saving one step, and where it lies."""

    step: Count64
    """Optimizer step."""
    attempt: Text32
    """Which try at saving the step it is, at most 32 characters."""
    local: LocalCopy | None = None
    """What the nodes hold of it: None, Partial or Sealed."""
    remote: RemoteCopy | None = None
    """What the remote tier holds of it: None, InFlight, Durable or Quarantined."""
    time: AwareDatetime | None = None
    """When it was saved, UTC."""
    size_bytes: Count64 | None = None
    """Bytes over all ranks."""
    pinned: bool | None = None
    """Whether retention leaves it alone."""


class RunStatus(ApiModel):
    """What is known of the run; each field has one writer."""

    # The gate's reports, by field manager `tidegate-gate`.
    run_id: Text36 | None = None
    """UUID of the run, the same as in run.json on both tiers."""
    progress: StepStatus | None = None
    """How far training is."""
    last_sealed: StepStatus | None = None
    """The newest step that every rank has sealed on its node."""
    last_durable: DurableStatus | None = None
    """The newest step that is committed on the remote tier."""
    last_restore: LastRestore | None = None
    """The newest restore of the run."""
    backlog: Backlog | None = None
    """What is sealed on the nodes and not yet durable."""
    saves: SaveCounts | None = None
    """Counts and durations of the run's saves."""
    save_request: SaveAnswer | None = None
    """How far the save asked for by spec.saveRequest has come."""
    last_report_time: AwareDatetime | None = None
    """When the run's pods reported last, UTC."""

    # The gate's drains, by field manager `tidegate-gate-drain` and the resourceVersion read.
    drains: Annotated[tuple[NodeDrain, ...], Field(max_length=32), ListMap(keys=("node",))] = Field(
        default_factory=tuple
    )
    """Drains of nodes that run pods of this run, at most 32; the oldest released one goes first."""

    # The controller's.
    observed_generation: Count64 | None = None
    """Generation of the spec that the controller saw last."""
    policy_generation: Count64 | None = None
    """Generation of the policy's spec that the controller applied last."""
    tiers: RunTiers | None = None
    """The tiers pinned at the run's first pod."""
    phase: RunPhase | None = None
    """What the run does now, for people: Pending, Restoring, Training, Idle, Silent or Finished."""
    drain: Text64 | None = None
    """Drains in a few words: Held, Off, or which node is in which state."""
    pods: RunPods | None = None
    """Counts of the run's pods."""
    restore_point: RestorePoint | None = None
    """What a restart would begin with now."""
    checkpoints: Annotated[
        tuple[CheckpointStatus, ...], Field(max_length=20), ListMap(keys=("step", "attempt"))
    ] = Field(default_factory=tuple)
    """The newest saved attempts, at most 20."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8), ListMap(keys=("type",))] = (
        Field(default_factory=tuple)
    )
    """Ready, Durable, Held, LocalTierHealthy and RemoteTierHealthy; at most 8."""
    tier_problems: Annotated[
        tuple[TierProblem, ...], Field(max_length=32), ListMap(keys=("node", "tier"))
    ] = Field(default_factory=tuple)
    """Tiers that a node cannot use as it should, at most 32."""
