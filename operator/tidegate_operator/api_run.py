"""CheckpointRun: one training run, what a user asks of it, its columns and how it is read.

Owns the kind and its spec, field by field; its status is `tidegate_operator.api_run_status`.
``make crds`` writes ``crds/`` from both, so the string below each field is what ``kubectl explain``
prints. Decides nothing and talks to no API server.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tidegate_operator.api_rules import ListSet, set_exactly_when
from tidegate_operator.api_run_status import RunStatus
from tidegate_operator.api_types import (
    CREATED,
    READY_REASON,
    READY_STATUS,
    ApiModel,
    Column,
    Count64,
    Label,
    Resource,
    ServedObject,
    Text64,
    parse_object,
    yaml_default,
)


class RunDrainMode(StrEnum):
    """How one run departs from its policy's drain mode."""

    INHERIT = "Inherit"
    OBSERVE = "Observe"
    OFF = "Off"


class RestoreFrom(StrEnum):
    """Where the next start begins."""

    NEWEST = "Newest"
    STEP = "Step"
    FRESH = "Fresh"


class RestoreSpec(ApiModel):
    """Where the next start of the run begins; obeyed once."""

    rules = (set_exactly_when("step", "from_", "Step"),)

    from_: RestoreFrom = RestoreFrom.NEWEST
    """Newest (default): the newest restorable step. Step: the one named. Fresh: nothing, from
    step 0."""
    step: Count64 | None = None
    """The optimizer step to restore, 0 or more; exactly with Step."""
    run: Label | None = None
    """Name of another run in this namespace whose checkpoint is read, at most 63 characters.
    Absent: this run."""


class RunSpec(ApiModel):
    """What a user asks of one run; every field is optional."""

    policy_name: Label | None = None
    """Name of the CheckpointPolicy in this namespace, at most 63 characters. Absent: the one that
    the pods name."""
    drain_mode: RunDrainMode = RunDrainMode.INHERIT
    """How drains treat this run: Inherit (default, as the policy says), Observe or Off."""
    restore: RestoreSpec | None = None
    """Where the next start begins; obeyed once. Absent: the newest restorable step."""
    save_request: Text64 | None = None
    """Any text of at most 64 characters; a new value asks for one save and its copy, answered in
    status.saveRequest."""
    pinned_steps: Annotated[tuple[Count64, ...], Field(max_length=16), ListSet()] = Field(
        default_factory=tuple
    )
    """Steps that retention never removes, at most 16."""


class CheckpointRun(ServedObject):
    """One training run: what is saved, durable and held, and what a user asks of it."""

    RESOURCE: ClassVar[Resource] = Resource(
        kind="CheckpointRun",
        plural="checkpointruns",
        singular="checkpointrun",
        short_name="crun",
        columns=(
            Column(name="Step", type="integer", path=".status.progress.step"),
            Column(name="Durable", type="integer", path=".status.lastDurable.step"),
            Column(name="Saved", type="date", path=".status.lastDurable.time"),
            Column(name="Backlog", type="string", path=".status.backlog.size"),
            Column(name="Drain", type="string", path=".status.drain"),
            Column(name="Ready", type="string", path=READY_STATUS),
            Column(name="Reason", type="string", path=READY_REASON),
            Column(name="Age", type="date", path=CREATED),
            Column(name="Policy", type="string", path=".spec.policyName", wide=True),
            Column(name="Phase", type="string", path=".status.phase", wide=True),
            Column(name="Pods", type="integer", path=".status.pods.running", wide=True),
        ),
    )

    spec: RunSpec = yaml_default({})
    """What a user asks of the run; every field is optional."""
    status: RunStatus = Field(default_factory=RunStatus)
    """What is known of the run."""


def parse_run(raw: Mapping[str, Any]) -> CheckpointRun:
    """Reads a CheckpointRun as the API server serves it; fields it does not know are ignored.

    Raises:
        Reject: A field is missing or bad; the sentence names it by its YAML path.
    """
    return parse_object(CheckpointRun, raw)
