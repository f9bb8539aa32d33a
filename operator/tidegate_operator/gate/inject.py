"""What is in a pod patch: raw AdmissionReview in, minimal patch out. Pure.

The pod is never parsed into typed models, which would drop the fields they do not know. What the
user set is never changed; a pod that cannot take the sidecar is left alone with a sentence. Two
operations do more than add, both on purpose: the grace period is raised to the policy's floor, and
the Job's count of ignored failures is removed, because its back-off doubles with each drain.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_operator.gate.injected import MARKS, Injected, build_injected
from tidegate_operator.gate.podpatch import PodPatch, find
from tidegate_operator.gate.sidecar import (
    SidecarSource,
    build_sidecar,
    build_trainer_environment,
)
from tidegate_operator.gate.trainers import find_trainers
from tidegate_operator.gate.volumes import build_mounts, build_volumes, check_mounts

DEFAULT_GRACE_SECONDS = 30
"""What Kubernetes gives a pod that names no grace period."""
AFFINITY_WEIGHT = 100

Pod = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """All that an injection depends on besides the pod.

    Attributes:
        source: what the sidecar is made from, the run and its places included.
        policy_name: of the CheckpointPolicy.
        generation: of its spec.
        version: of this release.
        is_held: whether drains of the run are enforced.
        grace_period: floor of the pod's termination grace period.
        preferred_node: where this completion index of the run was last; empty when not known.
        live_owner: uid of a workload whose pods run under the same derived name; None when there
            is none, or when it is this pod's own.
    """

    source: SidecarSource
    policy_name: str
    generation: int
    version: str
    is_held: bool
    grace_period: timedelta
    preferred_node: str = ""
    live_owner: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The outcome of one injection.

    Attributes:
        operations: RFC 6902; empty when the pod has everything already.
        warnings: sentences for whoever created the pod.
    """

    operations: Sequence[Mapping[str, Any]]
    warnings: tuple[str, ...] = ()


def build_response(uid: str, patch: Patch) -> dict[str, Any]:
    """The AdmissionReview that admits a pod with a patch."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch.operations:
        document = json.dumps(patch.operations, separators=(",", ":")).encode()
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(document).decode()
    if patch.warnings:
        response["warnings"] = list(patch.warnings)
    return _review(response)


def build_refusal(uid: str, sentence: str) -> dict[str, Any]:
    """The AdmissionReview that refuses a pod."""
    status = {"code": 409, "message": sentence}
    return _review({"uid": uid, "allowed": False, "status": status})


def _review(response: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def build_patch(pod: Pod, injection: Injection) -> Patch:
    """Decides what a pod gets.

    Args:
        pod: as in the review; it may have been here before.
        injection: what is known of its run.

    Raises:
        Reject: the pod cannot take the sidecar; the sentence says what is in the way.
    """
    _check_os(pod)
    trainers = find_trainers(pod)
    source = injection.source
    volumes = build_volumes(pod, source.places, source.run)
    for index in trainers.indices:
        check_mounts(pod["spec"]["containers"][index])
    patch = PodPatch(pod)
    is_new = _add_sidecar(pod, patch, injection, trainers.indices[0])
    for volume in volumes:
        patch.append(("spec", "volumes"), volume)
    environment = build_trainer_environment(pod, trainers.indices[0], source)
    for index in trainers.indices:
        _add_to_trainer(pod, patch, environment, index)
    if is_new:
        _add_affinity(patch, injection.preferred_node)
    _add_group(pod, patch, source.places.local.gid)
    _raise_grace(pod, patch, injection.grace_period)
    _add_metadata(pod, patch, injection, trainers.names)
    return Patch(operations=patch.operations, warnings=trainers.warnings)


def _check_os(pod: Pod) -> None:
    spec = pod["spec"]
    selected = (spec.get("nodeSelector") or {}).get("kubernetes.io/os")
    if "windows" in ((spec.get("os") or {}).get("name"), selected):
        raise Reject("this pod is for Windows nodes; Tidegate's sidecar runs on Linux only")


def _add_sidecar(pod: Pod, patch: PodPatch, injection: Injection, trainer: int) -> bool:
    spec = pod["spec"]
    if any(one["name"] == keys.SIDECAR_CONTAINER for one in spec["containers"]):
        raise Reject(
            f"spec.containers: the name {keys.SIDECAR_CONTAINER!r} is taken by a plain container; "
            "Tidegate's sidecar is an init container of that name"
        )
    if any(one["name"] == keys.SIDECAR_CONTAINER for one in spec.get("initContainers") or ()):
        return False
    # Behind the user's own: a native sidecar that brings the network starts before ours, and the
    # kubelet stops them in reverse order.
    patch.append(("spec", "initContainers"), build_sidecar(pod, trainer, injection.source))
    return True


def _add_to_trainer(
    pod: Pod, patch: PodPatch, environment: Sequence[Mapping[str, Any]], index: int
) -> None:
    container, path = pod["spec"]["containers"][index], ("spec", "containers", index)
    present = {one["name"] for one in container.get("env") or ()}
    for variable in environment:
        if variable["name"] not in present:
            patch.append((*path, "env"), variable)
    mounted = {one["mountPath"].rstrip("/") for one in container.get("volumeMounts") or ()}
    for mount in build_mounts():
        if mount["mountPath"] not in mounted:
            patch.append((*path, "volumeMounts"), mount)


def _add_affinity(patch: PodPatch, node: str) -> None:
    if not node:
        return
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    term = {"weight": AFFINITY_WEIGHT, "preference": {"matchFields": [here]}}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    patch.append(("spec", "affinity", "nodeAffinity", preferred), term)


def _add_group(pod: Pod, patch: PodPatch, gid: int | None) -> None:
    path = ("spec", "securityContext", "supplementalGroups")
    if gid is not None and gid not in (find(pod, path) or ()):
        patch.append(path, gid)


def _raise_grace(pod: Pod, patch: PodPatch, floor: timedelta) -> None:
    path = ("spec", "terminationGracePeriodSeconds")
    seconds, wanted = find(pod, path), int(floor.total_seconds())
    if seconds is None and wanted > DEFAULT_GRACE_SECONDS:
        patch.add(path, wanted)
    elif seconds is not None and seconds < wanted:
        patch.replace(path, wanted)


def _add_metadata(pod: Pod, patch: PodPatch, injection: Injection, trainers: Sequence[str]) -> None:
    labels = find(pod, ("metadata", "labels")) or {}
    annotations = find(pod, ("metadata", "annotations")) or {}
    for label, value in _labels(injection):
        if label not in labels:
            patch.add(("metadata", "labels", label), value)
    marks = [mark for mark in MARKS if injection.is_held and mark not in annotations]
    for mark in marks:
        patch.add(("metadata", "annotations", mark), MARKS[mark])
    if keys.INJECTED_ANNOTATION not in annotations:
        note = Injected(
            version=injection.version,
            policy=injection.policy_name,
            generation=injection.generation,
            containers=tuple(trainers),
            marks=tuple(marks),
            owner_uid=injection.source.run.owner_uid,
        )
        patch.add(("metadata", "annotations", keys.INJECTED_ANNOTATION), build_injected(note))
    if keys.JOB_IGNORED_FAILURES_ANNOTATION in annotations:
        patch.remove(("metadata", "annotations", keys.JOB_IGNORED_FAILURES_ANNOTATION))


def _labels(injection: Injection) -> Iterator[tuple[str, str]]:
    yield keys.RUN_LABEL, injection.source.run.name
    if injection.is_held:
        yield keys.HOLD_LABEL, keys.HOLD_VALUE
