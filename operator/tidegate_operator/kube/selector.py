"""Whether a label selector of the API matches labels. Pure."""

from collections.abc import Mapping
from typing import Any


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Applies a `metav1.LabelSelector`: all its parts must hold.

    Args:
        selector: None matches nothing, an empty one matches everything.
        labels: of the object.
    """
    if selector is None:
        return False
    exact = selector.get("matchLabels") or {}
    return all(labels.get(name) == value for name, value in exact.items()) and all(
        _holds(part, labels) for part in selector.get("matchExpressions") or ()
    )


def _holds(part: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(part["key"])
    match part["operator"]:
        case "In":
            return value in (part.get("values") or ())
        case "NotIn":
            return value not in (part.get("values") or ())
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False
