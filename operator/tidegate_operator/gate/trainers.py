"""Which containers of a pod train. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_contract import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainers:
    """The containers that get mounts and environment.

    Attributes:
        indices: into `spec.containers`, at least one.
        names: of the same.
        warnings: annotations that named none of the pod's containers.
    """

    indices: tuple[int, ...]
    names: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def find_trainers(pod: Mapping[str, Any]) -> Trainers:
    """Chooses by Tidegate's annotation, else kubectl's, else by extended resource, else the first.

    An annotation that names no container of the pod is passed over with a warning.
    """
    containers = pod["spec"]["containers"]
    positions = {container["name"]: index for index, container in enumerate(containers)}
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    warnings: list[str] = []
    for annotation in (keys.CONTAINERS_ANNOTATION, keys.DEFAULT_CONTAINER_ANNOTATION):
        named = [name.strip() for name in annotations.get(annotation, "").split(",")]
        unknown = [name for name in named if name and name not in positions]
        warnings += [_sentence(annotation, name, positions) for name in unknown]
        found = sorted({positions[name] for name in named if name in positions})
        if found:
            return _trainers(containers, found, warnings)
    by_device = [index for index, one in enumerate(containers) if _has_extended_resource(one)]
    return _trainers(containers, by_device[:1] or [0], warnings)


def _trainers(containers: Any, indices: list[int], warnings: list[str]) -> Trainers:
    return Trainers(
        indices=tuple(indices),
        names=tuple(containers[index]["name"] for index in indices),
        warnings=tuple(warnings),
    )


def _sentence(annotation: str, name: str, positions: Mapping[str, int]) -> str:
    allowed = ", ".join(positions)
    return f"annotation {annotation}: no container is named {name[:63]!r}; there is {allowed}"


def _has_extended_resource(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources") or {}
    names = {*(resources.get("requests") or ()), *(resources.get("limits") or ())}
    return any(
        "/" in name and not name.partition("/")[0].endswith("kubernetes.io") for name in names
    )
