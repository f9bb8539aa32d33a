"""The injected container and the environment that it shares with the trainer. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_contract import keys
from tidegate_operator.api_spec import SidecarSpec
from tidegate_operator.effective import Places
from tidegate_operator.gate.runname import RunName
from tidegate_operator.gate.volumes import build_mounts, build_token_mount
from tidegate_operator.settings import SidecarSettings

ROOT = 0
FALLBACK_ID = 65532
"""User of a sidecar that may not be root beside a trainer whose user only its image knows."""

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateAddress:
    """How a sidecar reaches the gate.

    Attributes:
        url: by address, as pods on the host network resolve no Service names.
        server_name: what the gate's certificate is checked against.
        authority: PEM text of the certificate authority.
    """

    url: str
    server_name: str
    authority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSource:
    """What the sidecar of one pod is made from.

    Attributes:
        run: that the pod belongs to.
        places: where the run lies.
        policy_document: the `wire.Policy` as text.
        spec: the policy's wishes for the container.
        settings: the installation's.
        gate: where reports go.
    """

    run: RunName
    places: Places
    policy_document: str
    spec: SidecarSpec
    settings: SidecarSettings
    gate: GateAddress

    def environment(self) -> list[Fields]:
        """Environment of trainer and sidecar alike."""
        fixed = {
            keys.ENV_RUN: str(self.run),
            keys.ENV_LOCAL: keys.LOCAL_MOUNT,
            keys.ENV_REMOTE: f"{keys.REMOTE_MOUNT}/{self.places.remote_path}",
            keys.ENV_POLICY: self.policy_document,
        }
        if self.run.owner_uid is not None:
            fixed[keys.ENV_RUN_DERIVED_OWNER] = self.run.owner_uid
        by_field = {
            keys.ENV_NODE: "spec.nodeName",
            keys.ENV_POD: "metadata.name",
            keys.ENV_POD_UID: "metadata.uid",
            keys.ENV_NAMESPACE: "metadata.namespace",
        }
        return [_fixed(name, value) for name, value in fixed.items()] + [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in by_field.items()
        ]


def build_sidecar(pod: Mapping[str, Any], trainer: int, source: SidecarSource) -> Fields:
    """The native sidecar beside one trainer container.

    Args:
        pod: as the user made it.
        trainer: index of the trainer container, whose user the sidecar runs as.
        source: what it is made from.
    """
    port = 0 if pod["spec"].get("hostNetwork") else source.spec.metrics_port
    gate = {
        keys.ENV_GATE_URL: source.gate.url,
        keys.ENV_GATE_SERVER_NAME: source.gate.server_name,
        keys.ENV_GATE_CA: source.gate.authority,
        keys.ENV_METRICS_PORT: str(port),
    }
    sidecar: Fields = {
        "name": keys.SIDECAR_CONTAINER,
        "image": source.settings.image,
        "imagePullPolicy": source.settings.pull_policy,
        "restartPolicy": "Always",
        "args": ["flush"],
        "env": source.environment() + [_fixed(name, value) for name, value in gate.items()],
        "volumeMounts": [*build_mounts(), build_token_mount()],
        "securityContext": _security_context(pod, trainer, source),
    }
    if port:
        sidecar["ports"] = [{"name": "tidegate", "containerPort": port}]
    if resources := _resources(pod, source):
        sidecar["resources"] = resources
    return sidecar


def build_trainer_environment(
    pod: Mapping[str, Any], trainer: int, source: SidecarSource
) -> list[Fields]:
    """What every trainer container of a pod is told, the user of its sidecar included.

    Args:
        pod: as in the review; it may have a sidecar already.
        trainer: index of the trainer container, whose user the sidecar runs as.
        source: what the sidecar is made from.
    """
    user = _find_user(pod["spec"], trainer, source)
    known = [] if user is None else [_fixed(keys.ENV_SIDECAR_UID, str(user))]
    return source.environment() + known


def _fixed(name: str, value: str) -> Fields:
    # The kubelet expands $(NAME) in values and reads $$ as $.
    return {"name": name, "value": value.replace("$", "$$")}


def _find_user(spec: Mapping[str, Any], trainer: int, source: SidecarSource) -> int | None:
    """The user of the pod's sidecar; None when only its image knows."""
    for one in spec.get("initContainers") or ():
        if one["name"] == keys.SIDECAR_CONTAINER:
            # It was made by an earlier review, by values that may have changed since.
            contexts = (one.get("securityContext"), spec.get("securityContext"))
            user = _first(*((context or {}).get("runAsUser") for context in contexts))
            return None if user is None else int(user)
    return _choose_user(spec, trainer, source)


def _choose_user(spec: Mapping[str, Any], trainer: int, source: SidecarSource) -> int:
    own = spec["containers"][trainer].get("securityContext") or {}
    shared = spec.get("securityContext") or {}
    user = _first(source.spec.run_as_user, own.get("runAsUser"), shared.get("runAsUser"))
    if user is not None:
        return int(user)
    # The kubelet would refuse to start a root container where the pod forbids root.
    forbids_root = _first(own.get("runAsNonRoot"), shared.get("runAsNonRoot"))
    return (source.places.local.gid or FALLBACK_ID) if forbids_root else ROOT


def _security_context(pod: Mapping[str, Any], trainer: int, source: SidecarSource) -> Fields:
    spec = pod["spec"]
    own = spec["containers"][trainer].get("securityContext") or {}
    shared = spec.get("securityContext") or {}
    context: Fields = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    user = context["runAsUser"] = _choose_user(spec, trainer, source)
    group = _first(source.spec.run_as_group, own.get("runAsGroup"), shared.get("runAsGroup"))
    if group is not None:
        context["runAsGroup"] = group
    # Also False is said: a pod-wide True would otherwise hold for a sidecar that must be root.
    context["runAsNonRoot"] = user != ROOT
    return context


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _resources(pod: Mapping[str, Any], source: SidecarSource) -> Fields:
    wanted = source.spec.resources
    if wanted is None:
        resources = dict(source.settings.resources)
    else:
        resources = wanted.model_dump(exclude_none=True)
    if resources and _is_guaranteed(pod["spec"]):
        # One container with requests below its limits would make the whole pod Burstable.
        limits = {**resources.get("requests", {}), **resources.get("limits", {})}
        return {"requests": limits, "limits": limits}
    return resources


def _is_guaranteed(spec: Mapping[str, Any]) -> bool:
    return all(_has_equal_bounds(one.get("resources") or {}) for one in _containers(spec))


def _has_equal_bounds(resources: Mapping[str, Any]) -> bool:
    limits = resources.get("limits") or {}
    requests = {**limits, **(resources.get("requests") or {})}
    return all(name in limits and requests[name] == limits[name] for name in ("cpu", "memory"))


def _containers(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from spec["containers"]
    yield from spec.get("initContainers") or ()
