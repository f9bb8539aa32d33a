"""Writes a manager's part of an object's status: once a pass, and only when it changed.

Called by the controller's reconcile and by the gate. Decides nothing.
"""

from collections.abc import Mapping, Set
from typing import Any

from tidegate_operator.kube.client import Client, Object
from tidegate_operator.kube.kinds import Kind


def is_same_status(observed: Mapping[str, Any], wanted: Mapping[str, Any], owned: Set[str]) -> bool:
    """Whether an object's status already says what a manager wants to say.

    Args:
        observed: the object as read.
        wanted: the manager's whole set of status fields.
        owned: names of the status fields that only this manager writes.
    """
    status = observed.get("status") or {}
    return {name: status[name] for name in owned if name in status} == wanted


async def apply_status(
    client: Client,
    kind: Kind,
    observed: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    manager: str,
    is_conditional: bool = False,
) -> Object:
    """Applies a manager's whole set of status fields, forced.

    Args:
        client: of the API server.
        kind: of the object.
        observed: the object as read; gives its name.
        wanted: the status fields; what the manager wrote before and leaves out now is deleted.
        manager: the field manager.
        is_conditional: True refuses the write when the object changed since it was read.

    Returns:
        The object after the write.

    Raises:
        Conflict: conditional, and the object changed.
        NotFound: the object is gone.
    """
    seen = observed["metadata"]
    metadata = {"name": seen["name"], "namespace": seen["namespace"]}
    if is_conditional:
        metadata["resourceVersion"] = seen["resourceVersion"]
    body = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": metadata,
        "status": dict(wanted),
    }
    return await client.apply(kind.path(seen["namespace"], seen["name"], "status"), body, manager)
