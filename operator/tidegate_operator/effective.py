"""What a policy comes to once the installation's tiers and limits are applied. Pure.

Owns the way from a CheckpointPolicy and the chart's settings to the values that pods work by: the
`wire.Policy` of trainer and sidecar, the limits of a hold, and where a run's copies lie. Called by
the gate at admission and for its clocks, and by the controller for `status.effective`.
"""

from dataclasses import dataclass
from datetime import timedelta

from tidegate_contract.cadence import Cadence
from tidegate_contract.digest import sha256_hex
from tidegate_contract.document import encode
from tidegate_contract.errors import Reject
from tidegate_contract.wire import Policy
from tidegate_operator.api import CheckpointPolicy
from tidegate_operator.api_run import RunDrainMode
from tidegate_operator.api_run_status import RunTiers
from tidegate_operator.api_spec import (
    CadenceSpec,
    DrainMode,
    DrainSpec,
    LocalSpec,
    LocalType,
    OnDeadline,
    OnRemoteUnreachable,
    OnUnrestorable,
    PolicySpec,
    RemoteSpec,
    RemoteType,
)
from tidegate_operator.settings import DrainSettings, TierSettings

EMPTY_DIR = "EmptyDir"
"""Name of the local tier that dies with its pod; names of other tiers are lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLimits:
    """How long a hold may last.

    Attributes:
        max_hold: from the first eviction to the release at the latest.
        freshness: a durable step younger than this makes another save needless.
        contact_timeout: a run that acknowledges no request for this long is let go.
        release_ttl: a release that is not used for this long on a schedulable node is taken back.
        blocks_at_deadline: True keeps the pods at the deadline.
    """

    max_hold: timedelta
    freshness: timedelta
    contact_timeout: timedelta
    release_ttl: timedelta
    blocks_at_deadline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """Where a node keeps a run's saves.

    Attributes:
        name: of the tier, or `EMPTY_DIR`.
        path: root of the tier on the node; None for a volume of the pod itself.
        gid: group that may write there; None where none is needed.
        size_limit_bytes: of the pod's own volume; None for no limit, and for a tier.
    """

    name: str
    path: str | None = None
    gid: int | None = None
    size_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlace:
    """Where a run's durable copies lie; exactly one of the two members is set.

    Attributes:
        name: `tier/NAME` or `claim/NAME`, as status shows it.
        host_path: root of the tier on every node.
        claim_name: PersistentVolumeClaim in the pod's namespace.
    """

    name: str
    host_path: str | None = None
    claim_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one run lies on both tiers.

    Attributes:
        local, remote: the tiers.
        remote_path: folder of the run below the root of the remote tier.
    """

    local: LocalPlace
    remote: RemotePlace
    remote_path: str


def build_wire_policy(spec: PolicySpec) -> Policy:
    """The values that trainer and sidecar work by."""
    return Policy(
        cadence=_cadence(spec.cadence),
        on_busy=spec.save.on_busy,
        on_failure=spec.save.on_failure,
        fail_after=spec.save.fail_after,
        save_timeout_seconds=spec.save.timeout.total_seconds(),
        local_keep=spec.local.keep,
        local_quota_bytes=spec.local.quota,
        high_watermark_percent=spec.local.high_watermark_percent,
        remote_every=spec.remote.every,
        remote_keep=spec.remote.keep,
        bandwidth_bytes_per_second=spec.remote.bandwidth_per_node,
        files_per_node=spec.remote.files_per_node,
        nodes_at_once=spec.remote.nodes_at_once,
        stall_timeout_seconds=spec.remote.stall_timeout.total_seconds(),
        freshness_seconds=spec.drain.freshness.total_seconds(),
        wait_for_flush_seconds=spec.recovery.wait_for_flush.total_seconds(),
        restore_timeout_seconds=spec.recovery.timeout.total_seconds(),
        max_restore_tries=spec.recovery.max_attempts_per_step,
        remote_unreachable_is_error=(
            spec.recovery.on_remote_unreachable is OnRemoteUnreachable.FAIL
        ),
        start_fresh_when_unrestorable=(spec.recovery.on_unrestorable is OnUnrestorable.START_FRESH),
    )


def policy_digest(policy: Policy) -> str:
    """What a sidecar reports as `known_policy_digest` when it works by this policy."""
    return sha256_hex(encode(policy))


def _cadence(spec: CadenceSpec) -> Cadence:
    auto = spec.auto
    optional: dict[str, int] = {}
    if spec.token_interval is not None:
        optional["tokens"] = spec.token_interval
    return Cadence(
        by=spec.by,
        steps=spec.steps,
        interval_seconds=_seconds(spec.interval),
        max_loss_seconds=_seconds(auto.max_loss) if auto else None,
        mtbf_seconds=_seconds(auto.mtbf) if auto else None,
        min_interval_seconds=spec.min_interval.total_seconds(),
        **optional,
    )


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def build_hold_limits(drain: DrainSpec, settings: DrainSettings) -> HoldLimits:
    """The policy's hold within what the installation allows."""
    return HoldLimits(
        max_hold=min(drain.max_hold, settings.max_hold_limit),
        freshness=drain.freshness,
        contact_timeout=settings.contact_timeout,
        release_ttl=settings.release_ttl,
        blocks_at_deadline=drain.on_deadline is OnDeadline.BLOCK and settings.allow_block,
    )


def decide_mode(drain: DrainSpec, run_mode: RunDrainMode, settings: DrainSettings) -> DrainMode:
    """How drains treat a run: the mildest of policy, run and installation."""
    if not settings.enabled or DrainMode.OFF in (drain.mode, run_mode):
        return DrainMode.OFF
    if DrainMode.OBSERVE in (drain.mode, run_mode):
        return DrainMode.OBSERVE
    return DrainMode.ENFORCE


def find_places(
    policy: CheckpointPolicy, run: str, tiers: TierSettings, pinned: RunTiers | None = None
) -> Places:
    """Where a run of this policy lies.

    Args:
        policy: of the run's namespace.
        run: name of the run.
        tiers: of the installation.
        pinned: what held at the run's first pod and wins over the policy; None for a new run.

    Raises:
        Reject: a tier that is named is none of the installation's.
    """
    namespace = policy.metadata.namespace
    where = f"policy {namespace}/{policy.metadata.name}"
    if pinned is None or pinned.local is None or pinned.remote is None:
        local = _local(policy.spec.local, tiers, where)
        remote = _remote(policy.spec.remote, tiers, where)
        parts = [policy.spec.remote.path, namespace, run]
        path = "/".join(part for part in parts if part)
    else:
        where = f"run {namespace}/{run}: status.tiers"
        local = _parse_local(pinned.local, policy.spec.local, tiers, where)
        remote = _parse_remote(pinned.remote, tiers, where)
        path = pinned.path or f"{namespace}/{run}"
    return Places(local=local, remote=remote, remote_path=path)


def build_run_tiers(places: Places) -> RunTiers:
    """What is pinned in `status.tiers` at the run's first pod; `find_places` reads it back."""
    return RunTiers(local=places.local.name, remote=places.remote.name, path=places.remote_path)


def _local(spec: LocalSpec, tiers: TierSettings, where: str) -> LocalPlace:
    if spec.type is LocalType.EMPTY_DIR:
        return _empty_dir(spec)
    if spec.tier is None and not tiers.local:
        raise Reject(f"{where}: spec.local needs a tier, and this installation has no local tier")
    return _local_tier(spec.tier or tiers.local[0].name, tiers, f"{where}: spec.local.tier")


def _parse_local(name: str, spec: LocalSpec, tiers: TierSettings, where: str) -> LocalPlace:
    return _empty_dir(spec) if name == EMPTY_DIR else _local_tier(name, tiers, f"{where}.local")


def _empty_dir(spec: LocalSpec) -> LocalPlace:
    limit = spec.empty_dir.size_limit if spec.empty_dir else None
    return LocalPlace(name=EMPTY_DIR, size_limit_bytes=limit)


def _local_tier(name: str, tiers: TierSettings, where: str) -> LocalPlace:
    for tier in tiers.local:
        if tier.name == name:
            return LocalPlace(name=name, path=tier.path, gid=tier.gid)
    raise Reject(_unknown(where, name, [tier.name for tier in tiers.local]))


def _remote(spec: RemoteSpec, tiers: TierSettings, where: str) -> RemotePlace:
    if spec.type is RemoteType.CLAIM:
        return RemotePlace(name=f"claim/{spec.claim_name}", claim_name=spec.claim_name)
    return _remote_tier(spec.tier or "", tiers, f"{where}: spec.remote.tier")


def _parse_remote(name: str, tiers: TierSettings, where: str) -> RemotePlace:
    kind, _, rest = name.partition("/")
    if kind == "claim":
        return RemotePlace(name=name, claim_name=rest)
    return _remote_tier(rest, tiers, f"{where}.remote")


def _remote_tier(name: str, tiers: TierSettings, where: str) -> RemotePlace:
    for tier in tiers.remote:
        if tier.name == name:
            return RemotePlace(
                name=f"tier/{name}", host_path=tier.host_path, claim_name=tier.claim_name
            )
    raise Reject(_unknown(where, name, [tier.name for tier in tiers.remote]))


def _unknown(where: str, name: str, allowed: list[str]) -> str:
    return (
        f"{where} {name!r} is no tier of this installation; it has {', '.join(allowed) or 'none'}"
    )
