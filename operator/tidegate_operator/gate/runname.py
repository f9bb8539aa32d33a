"""Which run a pod belongs to: read from the pod at its admission, before it has a uid. Pure.

A label names the run for good; otherwise the name is derived from the workload, and then it is
bound to the workload's uid, so that another Job of the same name is not taken for the same run.
Called by `gate.inject` and by whoever must name the run of a pod that was not injected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_contract.layout import check_run_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """The run of a pod.

    Attributes:
        namespace: of the pod; a run never spans namespaces.
        name: of the run, a DNS-1123 label.
        owner_uid: uid of the workload that a derived name is bound to; None when a label named
            the run, or when the workload's uid is not known at admission (a bare pod).
    """

    namespace: str
    name: str
    owner_uid: str | None = None

    def __str__(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


def parse_run_name(pod: Mapping[str, Any], namespace: str) -> RunName:
    """The run of a pod.

    The first of these names it: the label `tidegate.io/run`, the JobSet, the Job, the pod itself.

    Args:
        pod: the pod as the API server shows it at admission.
        namespace: of the request; the pod may not carry its own yet.

    Raises:
        Reject: nothing names the run, or the name is no DNS-1123 label.
    """
    metadata = pod.get("metadata") or {}
    labels = metadata.get("labels") or {}
    source, name, owner_uid = _name(metadata, labels)
    try:
        check_run_name(f"{namespace}/{name}")
    except Reject as error:
        raise Reject(f"{source}: {error}") from error
    return RunName(namespace=namespace, name=name, owner_uid=owner_uid)


def _name(metadata: Mapping[str, Any], labels: Mapping[str, str]) -> tuple[str, str, str | None]:
    if name := labels.get(keys.RUN_LABEL):
        return f"label {keys.RUN_LABEL}", name, None
    if name := labels.get(keys.JOBSET_NAME_LABEL):
        # The pod's controller is one Job of the set, and a restart of the set makes new Jobs.
        return f"label {keys.JOBSET_NAME_LABEL}", name, labels.get(keys.JOBSET_UID_LABEL)
    if name := labels.get(keys.JOB_NAME_LABEL):
        owner = labels.get(keys.JOB_UID_LABEL) or controller_uid(metadata)
        return f"label {keys.JOB_NAME_LABEL}", name, owner
    if name := metadata.get("name"):
        return "pod name", name, controller_uid(metadata)
    raise Reject(
        f"nothing names the run of this pod: set the label {keys.RUN_LABEL}, "
        "or create the pod by a Job, a JobSet or under a fixed name"
    )


def controller_uid(metadata: Mapping[str, Any]) -> str | None:
    """The uid of the object that manages the pod; None for a bare pod."""
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None
