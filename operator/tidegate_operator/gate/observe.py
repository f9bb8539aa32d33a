"""Facts for one decision, gathered from what this replica knows. Reads `World`, changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_operator.api_run import RunDrainMode
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits, build_hold_limits, decide_mode, find_places
from tidegate_operator.gate.evict import EvictionFacts
from tidegate_operator.gate.facts import LeadReport, NodeFacts, RunFacts
from tidegate_operator.gate.inject import Injection
from tidegate_operator.gate.records import NodeRecord, PodRecord, PolicyRecord, RunRecord, place_of
from tidegate_operator.gate.report_status import format_backlog
from tidegate_operator.gate.runname import RunName, parse_run_name
from tidegate_operator.gate.sidecar import GateAddress, SidecarSource
from tidegate_operator.gate.world import TakenReport, World
from tidegate_operator.kube.kinds import Key
from tidegate_operator.settings import DrainSettings, Settings

MARK_PATIENCE = timedelta(seconds=5)
"""How long a cordoned node may lack the timed taint that all replicas read the same moment from."""
NO_LIMITS = HoldLimits(
    max_hold=timedelta(0),
    freshness=timedelta(0),
    contact_timeout=timedelta(0),
    release_ttl=timedelta(0),
    blocks_at_deadline=False,
)
"""For a run whose policy is gone: nothing is held, so nothing is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What of this release every injection needs.

    Attributes:
        version: of this package.
        gate: where sidecars send their reports.
    """

    version: str
    gate: GateAddress


def observe_run(world: World, settings: DrainSettings, key: Key, now: datetime) -> RunFacts | None:
    """The facts of one run's holds; None when its CheckpointRun is not known."""
    record = world.runs.get(key)
    if record is None:
        return None
    pods = world.pods_of(key)
    policy = _policy_of(world, record, pods)
    names = {pod.facts.node for pod in pods.values()} | {one.node for one in record.drains}
    nodes = {name: world.nodes[name] for name in names if name in world.nodes}
    status, taken = record.run.status, world.reports.get(key)
    return RunFacts(
        name=f"{key.namespace}/{key.name}",
        mode=_mode(policy, record, settings),
        limits=build_hold_limits(policy.policy.spec.drain, settings) if policy else NO_LIMITS,
        is_conflicted=record.is_conflicted,
        drains=record.drains,
        nodes={name: _node(world, node, now) for name, node in nodes.items()},
        pods=tuple(pod.facts for pod in pods.values()),
        evictions=dict(world.evictions.get(key, {})),
        durable=record.durable,
        report=build_lead_report(taken) if taken else None,
        last_report_at=status.last_report_time,
        save_value=record.save_value,
        save_asked_at=_save_asked_at(world, key, record, now),
    )


def observe_eviction(
    world: World, settings: DrainSettings, namespace: str, pod: str
) -> EvictionFacts:
    """The facts of one eviction; cheap, as clients may ask in a hot loop."""
    found = world.pods.get(Key(namespace, pod))
    if found is None or found.run is None:
        return EvictionFacts()
    record, run = world.runs.get(found.run), found.run
    name = f"{run.namespace}/{run.name}"
    if record is None:
        return EvictionFacts(pod=found.facts, run=name)
    policy = _policy_of(world, record, {found.key: found})
    taken = world.reports.get(run)
    waiting = taken.report.backlog.size_bytes if taken else 0
    return EvictionFacts(
        pod=found.facts,
        run=name,
        is_known=True,
        mode=_mode(policy, record, settings),
        limits=build_hold_limits(policy.policy.spec.drain, settings) if policy else None,
        drain=next((one for one in record.drains if one.node == found.facts.node), None),
        pending=world.evictions.get(run, {}).get(found.facts.node),
        backlog=format_backlog(waiting) if waiting else "",
    )


def observe_injection(
    world: World, settings: Settings, release: Release, namespace: str, pod: Mapping[str, Any]
) -> Injection:
    """The facts of one admission.

    Raises:
        Reject: the pod names no policy that is known and sound, or nothing names its run.
    """
    labels = (pod.get("metadata") or {}).get("labels") or {}
    run = parse_run_name(pod, namespace)
    name = labels.get(keys.POLICY_LABEL, "")
    policy = world.policies.get(Key(namespace, name))
    if policy is None:
        raise Reject(
            f"label {keys.POLICY_LABEL}: namespace {namespace} has no CheckpointPolicy {name!r} "
            "that can be used"
        )
    key = Key(namespace, run.name)
    record = world.runs.get(key)
    pinned = record.run.status.tiers if record else None
    return Injection(
        source=SidecarSource(
            run=run,
            places=find_places(policy.policy, run.name, settings.tiers, pinned),
            policy_document=policy.document,
            spec=policy.policy.spec.sidecar,
            settings=settings.sidecar,
            gate=release.gate,
        ),
        policy_name=name,
        generation=policy.policy.metadata.generation,
        version=release.version,
        is_held=_mode(policy, record, settings.drain) is DrainMode.ENFORCE,
        grace_period=policy.policy.spec.drain.grace_period,
        preferred_node=world.last_nodes.get(key, {}).get(place_of(labels), ""),
        live_owner=_other_owner(world.pods_of(key), run),
    )


def _policy_of(
    world: World, record: RunRecord, pods: Mapping[Key, PodRecord]
) -> PolicyRecord | None:
    namespace, named = record.run.metadata.namespace, record.run.spec.policy_name
    if named is None:
        # A replacement may name another policy than a pod that is leaving.
        staying = sorted(pods.values(), key=lambda pod: not pod.facts.stays)
        named = next((pod.policy for pod in staying), "")
    return world.policies.get(Key(namespace, named))


def policy_of(world: World, key: Key) -> PolicyRecord | None:
    """The policy that a run is under now; None when there is none."""
    record = world.runs.get(key)
    if record is not None:
        return _policy_of(world, record, world.pods_of(key))
    named = next((pod.policy for pod in world.pods_of(key).values()), "")
    return world.policies.get(Key(key.namespace, named))


def _mode(
    policy: PolicyRecord | None, record: RunRecord | None, settings: DrainSettings
) -> DrainMode:
    if policy is None:
        return DrainMode.OFF
    run_mode = record.run.spec.drain_mode if record else RunDrainMode.INHERIT
    return decide_mode(policy.policy.spec.drain, run_mode, settings)


def _save_asked_at(world: World, key: Key, record: RunRecord, now: datetime) -> datetime | None:
    if not record.save_value:
        return None
    noted, (_, seen) = record.save_set_at, world.saves_seen.get(key, ("", now))
    # A note of the future is a wrong clock, or was made up.
    return noted if noted is not None and noted <= now else seen


def _node(world: World, node: NodeRecord, now: datetime) -> NodeFacts:
    since = node.marked_at if node.is_draining else None
    seen = world.drained_since.get(node.name)
    if node.is_draining and since is None and seen is not None and now - seen >= MARK_PATIENCE:
        since = seen
    return NodeFacts(name=node.name, uid=node.uid, draining_since=since)


def build_lead_report(taken: TakenReport) -> LeadReport:
    """What the hold looks at of a report."""
    report, state = taken.report, taken.report.state
    restore = state.restore if state else None
    sealed = state.sealed if state else None
    return LeadReport(
        received_at=taken.received_at,
        phase=state.phase if state else None,
        step=state.progress.step if state else None,
        stated_at=state.written_at if state else None,
        answer=state.answer if state else None,
        known_request_id=report.known_request_id,
        sealed=sealed.attempt if sealed else None,
        sealed_at=sealed.at if sealed else None,
        backlog_steps=report.backlog.steps,
        restored=restore.attempt if restore else None,
        restored_at=restore.at if restore else None,
    )


def _other_owner(pods: Mapping[Key, PodRecord], run: RunName) -> str | None:
    """The uid of another workload whose live pods run under the same derived name."""
    if run.owner_uid is None:
        return None
    for pod in pods.values():
        owner = pod.injected.owner_uid if pod.injected else None
        if pod.facts.stays and owner is not None and owner != run.owner_uid:
            return owner
    return None
