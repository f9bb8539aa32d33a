"""What the hold's machine looks at: one frozen record per run. Pure.

`gate.world` gathers them from what this replica has watched and heard; nothing here reads a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tidegate_contract.keys import DrainState
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import Phase, SaveAnswer
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits

ACTIVE = frozenset({DrainState.REQUESTED, DrainState.SAVING, DrainState.FLUSHING})
"""States in which something is awaited and a clock runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One entry of `status.drains`; a node without one is held.

    Attributes:
        node, node_uid: the node; another uid is another node.
        state: where the drain stands.
        reason: why that state was entered, one CamelCase word.
        requested_by: user of the first eviction; empty when there was none.
        requested_at: UTC of the eviction that this save answers; of the cordon when exposed.
        deadline: UTC, latest release. It never moves later while the entry lives.
        released_at: UTC; None before.
        message: what is awaited or what was found, one sentence without moving numbers.
    """

    node: str
    node_uid: str
    state: DrainState
    reason: str
    requested_by: str = ""
    requested_at: datetime
    deadline: datetime
    released_at: datetime | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node.

    Attributes:
        name, uid: of the node.
        draining_since: UTC since when it is cordoned or carries a drain taint; None while it takes
            new pods.
    """

    name: str
    uid: str
    draining_since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """One injected pod of the run.

    Attributes:
        name, uid: of the pod.
        node: where it is bound; empty before.
        is_running: its phase is Running.
        is_over: it succeeded or failed.
        is_terminating: it is being deleted.
        has_hold: it carries the hold label.
    """

    name: str
    uid: str
    node: str
    is_running: bool
    is_over: bool
    is_terminating: bool
    has_hold: bool

    @property
    def stays(self) -> bool:
        """Whether the pod is neither over nor leaving."""
        return not self.is_over and not self.is_terminating


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """`status.lastDurable`.

    Attributes:
        step: optimizer steps.
        nonce: of the attempt, 16 hex digits.
        at: UTC of the commit.
    """

    step: int
    nonce: str
    at: datetime

    def is_attempt(self, attempt: Attempt) -> bool:
        """Whether it is this very attempt."""
        return (self.step, self.nonce) == (attempt.step, attempt.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadReport:
    """The newest report of the run's lead that this replica took.

    Attributes:
        received_at: UTC by this replica's clock.
        phase: of the trainer; None when no trainer has spoken to its sidecar.
        step: newest agreed step; None alike.
        stated_at: UTC, when the trainer wrote the two; None alike.
        answer: to the newest save request; None before one.
        known_request_id: the newest request the sidecar has; 0 means none.
        sealed: newest attempt that all ranks of this trainer sealed; None before one.
        sealed_at: UTC of that seal; None alike.
        backlog_steps: sealed on the lead's node, by any trainer, and not yet durable.
        restored: the attempt this trainer started from; None for a fresh start.
        restored_at: UTC; None before.
    """

    received_at: datetime
    phase: Phase | None = None
    step: int | None = None
    stated_at: datetime | None = None
    answer: SaveAnswer | None = None
    known_request_id: int = 0
    sealed: Attempt | None = None
    sealed_at: datetime | None = None
    backlog_steps: int = 0
    restored: Attempt | None = None
    restored_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """An eviction that was answered and is not yet in `status.drains`.

    Attributes:
        node: of the pod.
        requested_by: user of the request.
        at: UTC.
    """

    node: str
    requested_by: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that decides about the holds of one run.

    Attributes:
        name: `namespace/name`.
        mode: how drains treat the run; OFF when its policy is gone.
        limits: of a hold.
        is_conflicted: another PDB matches the run's pods, so ours must not.
        drains: `status.drains`.
        nodes: by name.
        pods: the run's injected pods.
        evictions: by node, not yet recorded.
        durable: `status.lastDurable`; None while nothing is durable.
        report: None when the lead does not poll this replica.
        last_report_at: `status.lastReportTime`, whichever replica took it.
        save_value: `spec.saveRequest` while it is unanswered; empty otherwise.
        save_asked_at: UTC when that was set, never in the future; None without one.
    """

    name: str
    mode: DrainMode
    limits: HoldLimits
    is_conflicted: bool = False
    drains: tuple[Drain, ...] = ()
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    pods: tuple[PodFacts, ...] = ()
    evictions: Mapping[str, Eviction] = field(default_factory=dict)
    durable: Durable | None = None
    report: LeadReport | None = None
    last_report_at: datetime | None = None
    save_value: str = ""
    save_asked_at: datetime | None = None

    def stays_on(self, node: str) -> bool:
        """Whether a pod of the run is on the node and not leaving it."""
        return any(pod.node == node and pod.stays for pod in self.pods)

    def is_fresh(self, now: datetime) -> bool:
        """Whether the newest durable step is young enough to need no other."""
        return self.durable is not None and now - self.durable.at <= self.limits.freshness
