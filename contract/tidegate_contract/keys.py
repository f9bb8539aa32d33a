"""Names that cross process borders: labels, annotations, environment, paths, states, reasons.

Pure constants. The chart's templates are tested against this file; nothing else spells these names.
"""

from enum import StrEnum

GROUP = "tidegate.io"
VERSION = "v1alpha1"
MANAGED_BY = "tidegate"

POLICY_LABEL = f"{GROUP}/policy"
RUN_LABEL = f"{GROUP}/run"
HOLD_LABEL = f"{GROUP}/hold"
HOLD_VALUE = "true"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"

CONTAINERS_ANNOTATION = f"{GROUP}/containers"
INJECTED_ANNOTATION = f"{GROUP}/injected"
LAST_DURABLE_ANNOTATION = f"{GROUP}/last-durable"
DEFAULT_CONTAINER_ANNOTATION = "kubectl.kubernetes.io/default-container"
SAFE_TO_EVICT_ANNOTATION = "cluster-autoscaler.kubernetes.io/safe-to-evict"
DO_NOT_DISRUPT_ANNOTATION = "karpenter.sh/do-not-disrupt"

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
JOB_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
JOB_IGNORED_FAILURES_ANNOTATION = "batch.kubernetes.io/job-index-ignored-failure-count"

SIDECAR_CONTAINER = "tidegate-flush"
LOCAL_VOLUME = "tidegate-local"
REMOTE_VOLUME = "tidegate-remote"
TOKEN_VOLUME = "tidegate-token"

LOCAL_MOUNT = "/tidegate/local"
"""Where a pod sees its run's folder on the local tier."""
REMOTE_MOUNT = "/tidegate/remote"
"""Where a pod sees the root of the remote tier (not the run's folder: the sidecar makes that)."""
AGENT_LOCAL_TIERS = "/tidegate/tiers/local"
"""Where the agent sees the roots of the local tiers, each under its name."""
AGENT_REMOTE_TIERS = "/tidegate/tiers/remote"
"""Where the agent sees the roots of the remote tiers, each under its name."""
TOKEN_DIR = "/var/run/secrets/tidegate"
TOKEN_FILE = f"{TOKEN_DIR}/token"
TOKEN_AUDIENCE = "tidegate"

ENV_RUN = "TIDEGATE_RUN"
"""`namespace/name` of the run."""
ENV_RUN_DERIVED_OWNER = "TIDEGATE_RUN_OWNER"
"""UID of the owner a derived name is bound to; absent when a label named the run."""
ENV_LOCAL = "TIDEGATE_LOCAL"
"""The run's own folder on the local tier."""
ENV_REMOTE = "TIDEGATE_REMOTE"
"""The run's own folder on the remote tier (may not exist yet)."""
ENV_POLICY = "TIDEGATE_POLICY"
"""The policy's values at admission, a `wire.Policy` document."""
ENV_NODE = "TIDEGATE_NODE"
ENV_POD = "TIDEGATE_POD"
ENV_POD_UID = "TIDEGATE_POD_UID"
ENV_NAMESPACE = "TIDEGATE_NAMESPACE"
ENV_GATE_URL = "TIDEGATE_GATE_URL"
"""`https://<ClusterIP>:443`; pods on the host network resolve no Service names."""
ENV_GATE_SERVER_NAME = "TIDEGATE_GATE_SERVER_NAME"
"""Name the gate's certificate is checked against."""
ENV_GATE_CA = "TIDEGATE_GATE_CA"
"""PEM text of the certificate authority of the gate."""
ENV_METRICS_PORT = "TIDEGATE_METRICS_PORT"
ENV_PARENT = "TIDEGATE_PARENT"
"""Process id of the trainer, in the environment of a sidecar that a rank started itself."""
ENV_SIDECAR_UID = "TIDEGATE_SIDECAR_UID"
"""User id the sidecar container runs as; the trainer trusts files of that user."""

REPORT_PATH = "/v1/report"
INJECT_PATH = "/v1/inject"
EVICT_PATH = "/v1/evict"

EXIT_TERMINATED = 143
"""Exit status of a rank that saved and left because of SIGTERM (128 + 15)."""


class DrainState(StrEnum):
    """States of a held node in `CheckpointRun.status.drains`; no entry means Held."""

    REQUESTED = "Requested"
    SAVING = "Saving"
    FLUSHING = "Flushing"
    RELEASED = "Released"
    EXPOSED = "Exposed"


class ReleaseReason(StrEnum):
    """Why a node's pods were let go."""

    DURABLE = "Durable"
    FRESH = "Fresh"
    NOTHING_TO_LOSE = "NothingToLose"
    SILENT = "Silent"
    SAVE_FAILED = "SaveFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    OFF = "Off"


class RunCondition(StrEnum):
    """Types of the conditions of a CheckpointRun."""

    READY = "Ready"
    DURABLE = "Durable"
    HELD = "Held"


class RunReadyReason(StrEnum):
    """Reasons of a run's condition Ready."""

    ON_SCHEDULE = "OnSchedule"
    NOT_STARTED = "NotStarted"
    SAVE_FAILING = "SaveFailing"
    SILENT = "Silent"
    NOT_INJECTED = "NotInjected"
    FINISHED = "Finished"


class DurableReason(StrEnum):
    """Reasons of a run's condition Durable."""

    FRESH = "Fresh"
    LAGGING = "Lagging"
    NEVER_SAVED = "NeverSaved"
    STALLED = "Stalled"


class HeldReason(StrEnum):
    """Reasons of a run's condition Held."""

    HELD = "Held"
    IDLE = "Idle"
    RELEASED = "Released"
    SILENT = "Silent"
    PDB_CONFLICT = "PDBConflict"
    PDB_DELETED = "PDBDeleted"
    OFF = "Off"


class PolicyCondition(StrEnum):
    """Types of the conditions of a CheckpointPolicy."""

    ACCEPTED = "Accepted"
    INJECTING = "Injecting"
    READY = "Ready"


class AcceptedReason(StrEnum):
    """Reasons of a policy's condition Accepted."""

    VALID = "Valid"
    UNKNOWN_TIER = "UnknownTier"
    CLAIM_MISSING = "ClaimMissing"
    NOT_ALLOWED = "NotAllowed"


class InjectingReason(StrEnum):
    """Reasons of a policy's condition Injecting."""

    ALL_INJECTED = "AllInjected"
    PODS_MISSED = "PodsMissed"
    NO_PODS = "NoPods"
