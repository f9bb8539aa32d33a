"""Patches of the two webhook configurations, and of the owners of what the release has. Pure.

The chart's manifests have neither the CA bundle nor the namespaces: those fields are the
controller's. Called by `controller.reconcile`, which reads and writes the objects.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tidegate_operator.controller.objects import Object, Owner, build_owner

_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def build_namespace_selector(namespaces: Iterable[str]) -> Object:
    """Selects namespaces by name.

    Args:
        namespaces: none selects nothing.
    """
    names = sorted(set(namespaces))
    if not names:
        # Every namespace has this label; an empty selector would select all of them.
        return {"matchExpressions": [{"key": _NAMESPACE_NAME, "operator": "DoesNotExist"}]}
    return {"matchExpressions": [{"key": _NAMESPACE_NAME, "operator": "In", "values": names}]}


def decide_webhook_patch(
    configuration: Mapping[str, Any], bundle: str, selector: Mapping[str, Any] | None = None
) -> Object | None:
    """The strategic merge patch that a webhook configuration needs; None when it needs none.

    Args:
        configuration: as read.
        bundle: base64 of the CA bundle; empty leaves what is there.
        selector: wanted namespaceSelector; None leaves what is there.
    """
    hooks = []
    for hook in configuration.get("webhooks") or ():
        change: Object = {}
        if bundle and (hook.get("clientConfig") or {}).get("caBundle") != bundle:
            change["clientConfig"] = {"caBundle": bundle}
        if selector is not None and hook.get("namespaceSelector") != selector:
            # Strategic merge keeps what it is not told to drop.
            change["namespaceSelector"] = {"matchLabels": None, **selector}
        if change:
            hooks.append({"name": hook["name"], **change})
    return {"webhooks": hooks} if hooks else None


def decide_owner_patch(observed: Mapping[str, Any], owner: Owner) -> Object | None:
    """The strategic merge patch that gives an object its owner; None when it has it."""
    owners = observed["metadata"].get("ownerReferences") or ()
    if any(one.get("uid") == owner.uid for one in owners):
        return None
    # An owner of an earlier uid is dropped: it is gone, and with it this object would be.
    stale = [
        {"$patch": "delete", "uid": one["uid"]}
        for one in owners
        if (one.get("kind"), one.get("name")) == (owner.kind.kind, owner.name)
    ]
    return {"metadata": {"ownerReferences": [*stale, build_owner(owner)]}}
