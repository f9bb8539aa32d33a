"""The volumes and mounts of an injected pod, and what may be in their way. Pure."""

from collections.abc import Mapping
from typing import Any

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_operator.effective import LocalPlace, Places, RemotePlace
from tidegate_operator.gate.runname import RunName

TOKEN_SECONDS = 3600

Fields = dict[str, Any]


def build_volumes(pod: Mapping[str, Any], places: Places, run: RunName) -> list[Fields]:
    """The volumes that the pod still lacks.

    Raises:
        Reject: the pod has another volume under one of their names.
    """
    present = {one["name"]: one for one in pod["spec"].get("volumes") or ()}
    missing = []
    for volume in (_local(places.local, run), _remote(places.remote), _token()):
        there = present.get(volume["name"])
        if there is None:
            missing.append(volume)
        elif not _is_part_of(volume, there):
            raise Reject(
                f"spec.volumes: the name {volume['name']!r} is taken by another volume; "
                "Tidegate needs it for its own"
            )
    return missing


def build_mounts() -> list[Fields]:
    """What trainer and sidecar mount."""
    return [
        {"name": keys.LOCAL_VOLUME, "mountPath": keys.LOCAL_MOUNT},
        {"name": keys.REMOTE_VOLUME, "mountPath": keys.REMOTE_MOUNT},
    ]


def build_token_mount() -> Fields:
    """What only the sidecar mounts."""
    return {"name": keys.TOKEN_VOLUME, "mountPath": keys.TOKEN_DIR, "readOnly": True}


def check_mounts(container: Mapping[str, Any]) -> None:
    """Makes sure that a trainer would see the run's folders where its environment says.

    Raises:
        Reject: the container mounts something else at, above or below one of the two places.
    """
    wanted = {one["mountPath"]: one["name"] for one in build_mounts()}
    for mount in container.get("volumeMounts") or ():
        path = mount["mountPath"].rstrip("/")
        for place, volume in wanted.items():
            is_ours = path == place and mount["name"] == volume
            if not is_ours and _overlaps(path, place):
                raise Reject(
                    f"container {container['name']!r} mounts {mount['name']!r} at {path or '/'}, "
                    f"where Tidegate mounts {place}"
                )


def _overlaps(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _local(place: LocalPlace, run: RunName) -> Fields:
    if place.path is None:
        limit = place.size_limit_bytes
        source: Fields = {} if limit is None else {"sizeLimit": str(limit)}
        return {"name": keys.LOCAL_VOLUME, "emptyDir": source}
    # Directory, not DirectoryOrCreate: the agent makes the folder once it knows that the tier is
    # mounted, so that the root disk is never taken for it.
    path = f"{place.path.rstrip('/')}/{run}"
    return {"name": keys.LOCAL_VOLUME, "hostPath": {"path": path, "type": "Directory"}}


def _remote(place: RemotePlace) -> Fields:
    if place.host_path is None:
        claim = {"claimName": place.claim_name}
        return {"name": keys.REMOTE_VOLUME, "persistentVolumeClaim": claim}
    source = {"path": place.host_path, "type": "Directory"}
    return {"name": keys.REMOTE_VOLUME, "hostPath": source}


def _token() -> Fields:
    token = {
        "audience": keys.TOKEN_AUDIENCE,
        "expirationSeconds": TOKEN_SECONDS,
        "path": keys.TOKEN_FILE.removeprefix(f"{keys.TOKEN_DIR}/"),
    }
    return {"name": keys.TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}


def _is_part_of(wanted: Any, there: Any) -> bool:
    """Whether `there` says all that `wanted` says; the API server adds defaults between reviews."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(
            key in there and _is_part_of(value, there[key]) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(there, list)
            and len(there) == len(wanted)
            and all(map(_is_part_of, wanted, there))
        )
    return bool(wanted == there)
