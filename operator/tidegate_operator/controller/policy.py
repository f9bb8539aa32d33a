"""The status of a policy: what it comes to here, who is under it, which pods it missed. Pure.

Called by `controller.reconcile`.
"""

from datetime import datetime

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_contract.keys import AcceptedReason, InjectingReason, PolicyCondition
from tidegate_operator.api import (
    CheckpointPolicy,
    EffectivePolicy,
    MissedPod,
    PolicyPods,
    PolicyRuns,
    PolicyStatus,
)
from tidegate_operator.api_spec import OnDeadline
from tidegate_operator.controller.conditions import Verdict, build_conditions
from tidegate_operator.controller.facts import Pod, PolicyFacts
from tidegate_operator.effective import build_hold_limits, find_places
from tidegate_operator.quantity import format_duration
from tidegate_operator.settings import Settings

OWNED_POLICY_FIELDS = frozenset(
    {
        "observedGeneration",
        "effective",
        "runs",
        "pods",
        "missedPods",
        "conditions",
    }
)
"""Status fields that the controller, and nobody else, writes."""

MOST_MISSED = 10
_MOST_TEXT = 256


def decide_policy_status(facts: PolicyFacts, settings: Settings, now: datetime) -> PolicyStatus:
    """The whole status of a policy.

    Args:
        facts: of the policy.
        settings: of the installation.
        now: aware UTC.
    """
    policy, generation = facts.policy, facts.policy.metadata.generation
    live = [pod for pod in facts.pods if pod.is_live]
    injected = [pod for pod in live if pod.is_injected]
    missed = sorted((pod for pod in live if not pod.is_injected), key=lambda pod: pod.key)
    accepted = _accepted(facts, settings)
    injecting = _injecting(len(injected), missed)
    return PolicyStatus(
        observed_generation=generation,
        effective=_effective(policy, settings),
        runs=PolicyRuns(active=sum(run.is_active for run in facts.runs), total=len(facts.runs)),
        pods=PolicyPods(injected=len(injected), missed=len(missed)),
        missed_pods=tuple(
            MissedPod(name=pod.key.name, reason=describe_miss(pod, facts.created)[:_MOST_TEXT])
            for pod in missed[:MOST_MISSED]
        ),
        conditions=build_conditions(
            policy.status.conditions,
            [accepted, injecting, _ready(accepted, injecting)],
            generation,
            now,
        ),
    )


def describe_miss(pod: Pod, policy_created: datetime | None) -> str:
    """Why a pod that names the policy has no sidecar.

    Args:
        pod: the pod, which was not injected.
        policy_created: when the policy was made; None when not known.
    """
    if policy_created and pod.created and pod.created < policy_created:
        return "created before the policy"
    if pod.is_nameless:
        return (
            f"nothing named its run: it has a generated name, no Job and no label {keys.RUN_LABEL}"
        )
    return "the gate was not reachable when the pod was created, or refused it with a warning"


def _effective(policy: CheckpointPolicy, settings: Settings) -> EffectivePolicy:
    limits = build_hold_limits(policy.spec.drain, settings.drain)
    deadline = OnDeadline.BLOCK if limits.blocks_at_deadline else OnDeadline.RELEASE
    fields = {"max_hold": format_duration(limits.max_hold), "on_deadline": deadline.value}
    try:
        places = find_places(policy, policy.metadata.name, settings.tiers)
    except Reject:
        # The condition Accepted names the tier.
        return EffectivePolicy(**fields)
    return EffectivePolicy(**fields, local_tier=places.local.name, remote=places.remote.name)


def _accepted(facts: PolicyFacts, settings: Settings) -> Verdict:
    reason, message = _judge(facts, settings)
    return Verdict(
        type=PolicyCondition.ACCEPTED,
        is_true=reason is AcceptedReason.VALID,
        reason=reason,
        message=message,
    )


def _judge(facts: PolicyFacts, settings: Settings) -> tuple[AcceptedReason, str]:
    policy = facts.policy
    try:
        find_places(policy, policy.metadata.name, settings.tiers)
    except Reject as error:
        return AcceptedReason.UNKNOWN_TIER, str(error)
    if facts.missing_claim:
        found = f"there is no PersistentVolumeClaim {facts.missing_claim!r} in this namespace"
        return AcceptedReason.CLAIM_MISSING, f"spec.remote.claimName: {found}"
    if policy.spec.drain.on_deadline is OnDeadline.BLOCK and not settings.drain.allow_block:
        found = "this installation does not allow Block; pods are released at the deadline"
        return AcceptedReason.NOT_ALLOWED, f"spec.drain.onDeadline: {found}"
    return AcceptedReason.VALID, "the policy can be followed"


def _injecting(injected: int, missed: list[Pod]) -> Verdict:
    if missed:
        is_true, reason = False, InjectingReason.PODS_MISSED
        message = f"{len(missed)} pods that name this policy have no sidecar; see missedPods"
    elif injected:
        is_true, reason = True, InjectingReason.ALL_INJECTED
        message = "every pod that names this policy has the sidecar"
    else:
        return Verdict(
            type=PolicyCondition.INJECTING,
            is_true=None,
            reason=InjectingReason.NO_PODS,
            message="no pod names this policy",
        )
    return Verdict(type=PolicyCondition.INJECTING, is_true=is_true, reason=reason, message=message)


def _ready(accepted: Verdict, injecting: Verdict) -> Verdict:
    first = injecting if accepted.is_true else accepted
    return Verdict(
        type=PolicyCondition.READY,
        is_true=bool(accepted.is_true) and injecting.is_true is not False,
        reason=first.reason,
        message=first.message,
    )
