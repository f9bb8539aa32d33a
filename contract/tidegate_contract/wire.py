"""Documents between trainer, sidecar and gate. Pure.

`state-<rank>.json`  trainer → sidecar    every change and every few seconds
`control.json`       sidecar → trainer    on change
`Report`/`Reply`     lead sidecar ⇄ gate  a long poll
`Policy`             injected as environment, refreshed by `Reply`
`Target`             agent → agent        where a run's steps go once its pods are gone
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from tidegate_contract.cadence import Cadence
from tidegate_contract.layout import Attempt, check_tier_path


class Phase(StrEnum):
    """What a trainer does now."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    TRAINING = "Training"
    STOPPING = "Stopping"
    FINISHED = "Finished"


class OnBusy(StrEnum):
    """What a due save does when no snapshot slot is free."""

    BLOCK = "Block"
    SKIP = "Skip"


class OnFailure(StrEnum):
    """What a failed save does to training."""

    CONTINUE = "Continue"
    PAUSE = "Pause"
    FAIL = "Fail"


class AnswerResult(StrEnum):
    """How far a requested save has come."""

    ACKNOWLEDGED = "Acknowledged"
    SEALED = "Sealed"
    FAILED = "Failed"
    NOTHING_NEW = "NothingNew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The values of a CheckpointPolicy that a pod works by.

    Attributes:
        cadence: when to save.
        on_busy, on_failure, fail_after: see CheckpointPolicy `spec.save`; `fail_after` in a row.
        save_timeout_seconds: a save that takes longer has failed.
        local_keep: newest sealed steps kept on the node.
        local_quota_bytes: of this run on one node; None means no quota.
        high_watermark_percent: fill of the local tier from which saves wait for the flush.
        remote_every: every Nth sealed step is flushed.
        remote_keep: newest durable steps kept.
        bandwidth_bytes_per_second: cap of this node's copy; None means unlimited.
        files_per_node: files copied at once.
        nodes_at_once: nodes of the run that copy at once; 0 means automatic.
        stall_timeout_seconds: remote I/O without progress for this long counts as hung.
        freshness_seconds: a durable step younger than this makes a drain's save needless.
        wait_for_flush_seconds: a restore waits this long for a newer, announced attempt.
        restore_timeout_seconds: a restore that takes longer has failed.
        max_restore_tries: restores of a step in a row that do not come back to training, after
            which it is set aside.
        remote_unreachable_is_error: False restores from the local tier alone.
        start_fresh_when_unrestorable: False makes that an error.
    """

    KIND: ClassVar[str] = "policy"

    cadence: Cadence = field(default_factory=Cadence)
    on_busy: OnBusy = OnBusy.BLOCK
    on_failure: OnFailure = OnFailure.CONTINUE
    fail_after: int = 3
    save_timeout_seconds: float = 600.0
    local_keep: int = 2
    local_quota_bytes: int | None = None
    high_watermark_percent: int = 85
    remote_every: int = 1
    remote_keep: int = 3
    bandwidth_bytes_per_second: int | None = None
    files_per_node: int = 4
    nodes_at_once: int = 0
    stall_timeout_seconds: float = 120.0
    freshness_seconds: float = 60.0
    wait_for_flush_seconds: float = 300.0
    restore_timeout_seconds: float = 1800.0
    max_restore_tries: int = 3
    remote_unreachable_is_error: bool = True
    start_fresh_when_unrestorable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Save now and flush it first.

    Attributes:
        request_id: 1 … 2^63-1, drawn by the gate; it travels in the agreement's message.
        deadline: UTC; after it nobody waits for the answer.
    """

    request_id: int
    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """`control.json`.

    Attributes:
        policy: live values; None until the gate has answered once.
        request: the newest save request; obeyed once.
        is_backlogged: True makes the next save wait until the flush has caught up.
    """

    KIND: ClassVar[str] = "control"

    policy: Policy | None = None
    request: SaveRequest | None = None
    is_backlogged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """One step in a report.

    Attributes:
        attempt: None for a step that is not (yet) saved.
        step, tokens: agreed counts.
        at: UTC.
    """

    step: int
    tokens: int
    at: datetime
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableNote:
    """The newest commit that was read back.

    Attributes:
        step, tokens, attempt: of the commit.
        committed_at: UTC.
        path: folder on the remote tier, relative to the tier's root.
        size_bytes: of all files.
        manifest_sha256: 64 hex digits.
    """

    step: int
    tokens: int
    attempt: Attempt
    committed_at: datetime
    path: str
    size_bytes: int
    manifest_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAnswer:
    """What became of a save request.

    Attributes:
        request_id: of the request.
        result: how far it came; `NOTHING_NEW` when the newest sealed step already holds everything.
        attempt: the attempt that answers it, once known.
        failures: failed tries so far.
    """

    request_id: int
    result: AnswerResult
    attempt: Attempt | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreNote:
    """How this trainer started.

    Attributes:
        attempt: what was restored; None for a fresh start.
        tier: `Local`, `Remote` or `Mixed`; None for a fresh start.
        reason: why this attempt and no newer one, a sentence.
        lineage: claimed by this restore.
        seconds: wall time of the restore.
        bytes_local, bytes_remote: read from each tier by this rank.
        at: UTC.
    """

    attempt: Attempt | None = None
    tier: str | None = None
    reason: str
    lineage: int
    seconds: float
    bytes_local: int = 0
    bytes_remote: int = 0
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFigures:
    """Counters and durations of saves.

    Attributes:
        total, failed: saves since the trainer started.
        pause_ms: training stood still for the newest save, milliseconds.
        seal_ms: start of the newest save until its seal, milliseconds.
    """

    total: int = 0
    failed: int = 0
    pause_ms: int = 0
    seal_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """`state-<rank>.json`.

    Attributes:
        run_id: UUID of the run.
        rank, world_size: of the writer.
        pod_uid: of the writer's pod; empty outside Kubernetes. In rank 0's it names the lead.
        phase: what the trainer does.
        progress: newest agreed step.
        sealed: newest step that all ranks sealed, known from the agreement.
        answer: to the newest save request.
        restore: how it started; None before.
        saves: counters.
        written_at: UTC heartbeat.
    """

    KIND: ClassVar[str] = "state"

    run_id: str
    rank: int
    world_size: int
    pod_uid: str
    phase: Phase
    progress: StepNote
    sealed: StepNote | None = None
    answer: SaveAnswer | None = None
    restore: RestoreNote | None = None
    saves: SaveFigures = field(default_factory=SaveFigures)
    written_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Sealed here and not yet durable.

    Attributes:
        steps, size_bytes: amount.
        oldest_at: UTC of the oldest such seal; None when there is none.
    """

    steps: int = 0
    size_bytes: int = 0
    oldest_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The lead sidecar's word to the gate.

    Attributes:
        namespace, run, pod, pod_uid: who speaks; the gate checks them against the token.
        run_id: UUID of the run.
        state: rank 0's newest document; None before the trainer wrote one.
        durable: newest commit that was read back; None while there is none.
        backlog: of this node.
        flushed_bytes: of the step being copied, on this node.
        remote_reason: `OK`, or why the remote tier does not take data.
        remote_message: a sentence for people; when OK it is empty, or says why old steps stay.
        known_request_id: the newest request this sidecar has; the gate answers at once when it has
            another one. 0 means none.
        known_policy_digest: SHA-256 of the policy document this sidecar works by; alike.
    """

    KIND: ClassVar[str] = "report"

    namespace: str
    run: str
    pod: str
    pod_uid: str
    run_id: str
    state: TrainerState | None = None
    durable: DurableNote | None = None
    backlog: Backlog = field(default_factory=Backlog)
    flushed_bytes: int = 0
    remote_reason: str = "OK"
    remote_message: str = ""
    known_request_id: int = 0
    known_policy_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The gate's answer: at once when there is news, else at the end of the poll.

    Attributes:
        policy: live values; None when the sidecar's are current.
        request: a save to make now; None when there is none.
        poll_seconds: how long the gate holds the next poll.
    """

    KIND: ClassVar[str] = "reply"

    policy: Policy | None = None
    request: SaveRequest | None = None
    poll_seconds: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`<run>.target.json` beside the run's folder on a local tier, of the agent alone.

    Attributes:
        tier: name of the admin's remote tier.
        path: the run's folder there, relative to the tier's root.
        uid, gid: of the trainer; the agent's copies run under them.
        policy: the values at admission of the newest pod.
    """

    KIND: ClassVar[str] = "target"

    tier: str
    path: str
    uid: int
    gid: int
    policy: Policy

    def __post_init__(self) -> None:
        """Refuses a path that could leave the tier."""
        check_tier_path(self.path)
