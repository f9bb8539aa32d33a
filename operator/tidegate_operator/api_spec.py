"""The spec of a CheckpointPolicy: what every run under a policy does.

Owns its fields, defaults, bounds and rules; ``make crds`` writes ``crds/`` from it, so the string
below each field is what ``kubectl explain`` prints. Edits reach running pods, hold for pods created
later, or the run keeps what held at its first pod; each description says which. Decides nothing and
talks to no API server.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from tidegate_contract.cadence import DEFAULT_TOKENS, CadenceKind
from tidegate_contract.wire import OnBusy, OnFailure
from tidegate_operator.api_rules import (
    Rule,
    allowed_only_when,
    at_least,
    between,
    set_exactly_when,
)
from tidegate_operator.api_types import (
    ApiModel,
    Count32,
    Count64,
    Duration,
    Int32,
    Int64,
    Label,
    Quantity,
    Size,
    yaml_default,
)


class LocalType(StrEnum):
    """Where a node keeps the saves of its pods."""

    TIER = "Tier"
    EMPTY_DIR = "EmptyDir"


class RemoteType(StrEnum):
    """Where a run's durable copies lie."""

    TIER = "Tier"
    CLAIM = "Claim"


class DrainMode(StrEnum):
    """What an eviction of a training pod meets."""

    ENFORCE = "Enforce"
    OBSERVE = "Observe"
    OFF = "Off"


class OnDeadline(StrEnum):
    """What happens to a held pod once its time is over."""

    RELEASE = "Release"
    BLOCK = "Block"


class OnNewOwner(StrEnum):
    """What another Job meets that derives the name of an existing run."""

    FAIL = "Fail"
    RESUME = "Resume"
    FRESH = "Fresh"


class OnRemoteUnreachable(StrEnum):
    """What a restore does without its remote tier."""

    FAIL = "Fail"
    LOCAL_ONLY = "LocalOnly"


class OnUnrestorable(StrEnum):
    """What a restore does when checkpoints exist and none can be read."""

    FAIL = "Fail"
    START_FRESH = "StartFresh"


class RestoreOrder(StrEnum):
    """What a restore reads first."""

    WHOLE = "Whole"
    WEIGHTS_FIRST = "WeightsFirst"


class Prefetch(StrEnum):
    """When remote files that a restart needs are brought to the node."""

    BACKGROUND = "Background"
    OFF = "Off"


class AutoCadence(ApiModel):
    """The loss that is accepted, from which the interval between saves follows."""

    max_loss: Annotated[Duration, between("10s", "24h")]
    """Longest training time that a failure may cost, as in 10m; 10s to 24h."""
    mtbf: Duration | None = None
    """Mean time between failures of this run, as in 36h; shortens the interval to what costs least
    with the measured pause. Absent: not known."""


class CadenceSpec(ApiModel):
    """When a run saves. Edits reach running pods."""

    rules = (
        allowed_only_when("tokens", "by", "Tokens"),
        set_exactly_when("steps", "by", "Steps"),
        set_exactly_when("interval", "by", "Interval"),
        set_exactly_when("auto", "by", "Auto"),
    )

    by: CadenceKind = CadenceKind.TOKENS
    """What is counted between two saves: Tokens (default), Steps, Interval or Auto."""
    # No schema default: it would be stored, and then every switch of `by` would be refused.
    tokens: Annotated[Int64, Field(ge=1)] | None = None
    """Tokens over all ranks between two saves, at least 1; only with Tokens. Absent: 50000000."""
    steps: Annotated[Int32, Field(ge=1)] | None = None
    """Optimizer steps between two saves, at least 1; exactly with Steps."""
    interval: Annotated[Duration, between("10s", "24h")] | None = None
    """Wall time between two saves, as in 10m, 10s to 24h; exactly with Interval."""
    auto: AutoCadence | None = None
    """The accepted loss from which the interval follows; exactly with Auto."""
    min_interval: Duration = yaml_default("0s")
    """Least wall time between two saves, whatever is counted; default 0s, no floor."""

    @property
    def token_interval(self) -> int | None:
        """Tokens over all ranks between two saves; None when something else is counted."""
        if self.by is not CadenceKind.TOKENS:
            return None
        return DEFAULT_TOKENS if self.tokens is None else self.tokens


class EmptyDir(ApiModel):
    """A volume of the pod itself."""

    size_limit: Size | None = None
    """Bytes the volume may hold, as in 40Gi. Absent: what the node has."""


class LocalSpec(ApiModel):
    """The fast tier on each node. Pinned at the run's first pod, but for the quota."""

    rules = (
        allowed_only_when("tier", "type", "Tier"),
        set_exactly_when("empty_dir", "type", "EmptyDir"),
    )

    type: LocalType = LocalType.TIER
    """Tier (default): a disk of the node that outlives the pod. EmptyDir: a volume that dies with
    its pod, so nothing on it is adopted or restored after the pod is gone."""
    tier: Label | None = None
    """Name of a local tier of the installation, at most 63 characters; only with Tier. Absent: the
    first one."""
    empty_dir: EmptyDir | None = None
    """The volume; exactly with EmptyDir."""
    quota: Size | None = None
    """Bytes this run may hold on one node, as in 400Gi; edits reach running pods. Absent: no
    quota."""
    high_watermark_percent: Annotated[Int32, Field(ge=50, le=99)] = 85
    """Fill of the tier in percent from which a save waits for the copy of the one before; default
    85, 50 to 99."""
    keep: Annotated[Int32, Field(ge=1, le=64)] = 2
    """Newest sealed steps kept on the node; default 2, 1 to 64."""


_RELATIVE_PATH = Rule(
    cel="!self.startsWith('/') && !self.split('/').exists(p, p in ['', '.', '..'])",
    message="must be a relative path without empty, . or .. parts",
    holds=lambda path: not {"", ".", ".."} & set(path.split("/")),
)
_CLAIM_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


class RemoteSpec(ApiModel):
    """The durable tier. Where it lies is pinned at the run's first pod."""

    rules = (
        set_exactly_when("tier", "type", "Tier"),
        set_exactly_when("claim_name", "type", "Claim"),
    )

    type: RemoteType
    """Required. Tier: a remote tier of the installation. Claim: a volume claim of this
    namespace."""
    tier: Label | None = None
    """Name of a remote tier of the installation, at most 63 characters; exactly with Tier."""
    claim_name: (
        Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_CLAIM_PATTERN)]
        | None
    ) = None
    """Name of a PersistentVolumeClaim in this namespace that several nodes can write, at most 253
    characters; exactly with Claim."""
    path: Annotated[str, StringConstraints(min_length=1, max_length=128), _RELATIVE_PATH] | None = (
        None
    )
    """Folder below the root of the tier or claim, relative, without empty, . or .. parts, at most
    128 characters. Absent: the root."""
    every: Annotated[Int32, Field(ge=1, le=1000)] = 1
    """Every how many sealed steps one is copied; default 1, 1 to 1000. Edits reach running pods."""
    keep: Annotated[Int32, Field(ge=1, le=1000)] = 3
    """Newest durable steps kept; default 3, 1 to 1000. Edits reach running pods."""
    keep_every_steps: Count64 = 0
    """Durable steps at multiples of this number are kept for ever; default 0, none. Edits reach
    running pods."""
    bandwidth_per_node: Annotated[Size, at_least("1Mi")] | None = None
    """Bytes per second that one node copies at most, as in 800Mi, at least 1Mi; edits reach running
    pods. Absent: unlimited."""
    files_per_node: Annotated[Int32, Field(ge=1, le=64)] = 4
    """Files that one node copies at once; default 4, 1 to 64. Edits reach running pods."""
    nodes_at_once: Count32 = 0
    """Nodes of the run that copy at once; default 0, chosen from the run's size. Edits reach
    running pods."""
    stall_timeout: Annotated[Duration, between("10s", "1h")] = yaml_default("2m")
    """Time without any progress after which a read or write counts as hung; default 2m, 10s to 1h.
    Edits reach running pods."""


class SaveSpec(ApiModel):
    """How a save behaves. Edits reach running pods, but for the staging memory."""

    on_busy: OnBusy = OnBusy.BLOCK
    """A save is due while all snapshot memory is in use: Block (default) waits for it, Skip leaves
    that save out."""
    on_failure: OnFailure = OnFailure.CONTINUE
    """Saves failed failAfter times in a row: Continue (default) trains on, Pause waits until one
    succeeds, Fail ends the job."""
    fail_after: Annotated[Int32, Field(ge=1, le=100)] = 3
    """Failed saves in a row before onFailure applies; default 3, 1 to 100."""
    timeout: Annotated[Duration, between("10s", "24h")] = yaml_default("10m")
    """Time after which a save that is not sealed has failed; default 10m, 10s to 24h."""
    staging_memory: Size | None = None
    """Bytes of host memory for snapshots in each pod, as in 64Gi; holds for pods created later.
    Absent: what two snapshots need."""


class DrainSpec(ApiModel):
    """How training pods meet a drain of their node. Edits reach running pods."""

    mode: DrainMode = DrainMode.ENFORCE
    """Enforce (default): a pod may be evicted once what it would lose is durable. Observe: an
    eviction asks for a save and holds nothing. Off: evictions are ignored."""
    freshness: Annotated[Duration, between("0s", "1h")] = yaml_default("60s")
    """A durable step younger than this lets a pod go without another save; default 60s, 0s to 1h,
    shorter than maxHold."""
    max_hold: Annotated[Duration, between("30s", "24h")] = yaml_default("10m")
    """Longest time one drain may hold a node; default 10m, 30s to 24h. The installation may lower
    it; status.effective.maxHold is what holds."""
    on_deadline: OnDeadline = OnDeadline.RELEASE
    """At the end of maxHold: Release (default) lets the pods go, Block keeps them; Block only where
    the installation allows it."""
    grace_period: Annotated[Duration, between("10s", "1h")] = yaml_default("2m")
    """Least termination grace period of a training pod; default 2m, 10s to 1h. Holds for pods
    created later."""


class RecoverySpec(ApiModel):
    """How a run is restored. Edits hold for pods created later."""

    on_new_owner: OnNewOwner = OnNewOwner.FAIL
    """Another Job derives the name of this run: Fail (default) refuses it, Resume goes on with the
    run, Fresh moves the old run aside. A name set by label always resumes."""
    on_unrestorable: OnUnrestorable = OnUnrestorable.FAIL
    """Checkpoints exist and none can be restored: Fail (default) or StartFresh."""
    order: RestoreOrder = RestoreOrder.WHOLE
    """Whole (default): training starts when all is read. WeightsFirst: weights are usable while the
    optimizer is still read."""
    prefetch: Prefetch = Prefetch.BACKGROUND
    """Whether remote files that a restart needs are brought to the node beforehand: Background
    (default) or Off."""
    max_attempts_per_step: Annotated[Int32, Field(ge=1, le=20)] = 3
    """Failed restores of one step before it is quarantined; default 3, 1 to 20."""
    timeout: Annotated[Duration, between("1m", "24h")] = yaml_default("30m")
    """Time after which a restore has failed; default 30m, 1m to 24h."""
    wait_for_flush: Annotated[Duration, between("0s", "1h")] = yaml_default("5m")
    """How long a restore waits for a newer step that all ranks began to copy; default 5m, 0s to
    1h."""
    on_remote_unreachable: OnRemoteUnreachable = OnRemoteUnreachable.FAIL
    """The remote tier cannot be reached: Fail (default), or LocalOnly restores what the nodes
    hold."""


Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]


class SidecarResources(ApiModel):
    """Requests and limits of the sidecar container."""

    requests: Quantities | None = None
    """Quantities requested, by resource name, as in cpu 100m; at most 16."""
    limits: Quantities | None = None
    """Quantities allowed, by resource name, as in memory 512Mi; at most 16."""


_METRICS_PORT = Rule(
    cel="self == 0 || self >= 1024",
    message="must be 0 or 1024..65535",
    holds=lambda port: port == 0 or port >= 1024,
)


class SidecarSpec(ApiModel):
    """The container that copies saves. Edits hold for pods created later."""

    resources: SidecarResources | None = None
    """Requests and limits of the sidecar. Absent: those of the installation."""
    run_as_user: Count64 | None = None
    """User id of the sidecar, 0 or more. Absent: the trainer's."""
    run_as_group: Count64 | None = None
    """Group id of the sidecar, 0 or more. Absent: the trainer's."""
    metrics_port: Annotated[Int32, Field(ge=0, le=65535), _METRICS_PORT] = 9464
    """Port of the sidecar's metrics; default 9464, 0 (off) or 1024 to 65535. Always off in pods on
    the host network."""


class PolicySpec(ApiModel):
    """What every run under this policy does."""

    rules = (
        Rule(
            cel="duration(self.drain.freshness) < duration(self.drain.maxHold)",
            message="drain.freshness must be shorter than drain.maxHold",
            field_path=".drain.freshness",
            holds=lambda spec: spec.drain.freshness < spec.drain.max_hold,
        ),
    )

    cadence: CadenceSpec = yaml_default({"by": "Tokens"})
    """When a run saves; default every 50000000 tokens. Edits reach running pods."""
    # The API server validates a default before the defaults inside it apply, so `{}` is refused.
    local: LocalSpec = yaml_default({"type": "Tier"})
    """The fast tier on each node; default the installation's first local tier. Pinned at the run's
    first pod."""
    remote: RemoteSpec
    """The durable tier, required. Where it lies is pinned at the run's first pod."""
    save: SaveSpec = yaml_default({})
    """How a save behaves; each field has a default. Edits reach running pods."""
    drain: DrainSpec = yaml_default({})
    """How training pods meet a drain of their node; each field has a default. Edits reach running
    pods."""
    recovery: RecoverySpec = yaml_default({})
    """How a run is restored; each field has a default. Edits hold for pods created later."""
    sidecar: SidecarSpec = yaml_default({})
    """The container that copies saves; each field has a default. Edits hold for pods created
    later."""
    history_ttl: Annotated[Duration, between("1h", "8760h")] = yaml_default("720h")
    """How long the CheckpointRun of a finished run stays; default 720h, 1h to 8760h. Removes the
    object, never data."""
