"""The note that an injection leaves on a pod: builder beside parser. Pure.

Read by the gate itself (which marks to lift on release, which owner a derived name is bound to) and
by the controller (which pods were missed). Says nothing that the pod's spec says.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate_contract import keys

MAX_NOTE = 16 << 10
"""Characters; users can write what they like. A note of a hundred trainers is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """What was decided when a pod was admitted.

    Attributes:
        version: of the gate that injected.
        policy: name of the CheckpointPolicy.
        generation: of that policy's spec.
        containers: the trainer containers.
        marks: annotations that keep node scalers away and that the user had not set; they are
            lifted with the hold.
        owner_uid: uid that a derived run name is bound to; None for a name set by label.
    """

    version: str
    policy: str
    generation: int
    containers: tuple[str, ...]
    marks: tuple[str, ...] = ()
    owner_uid: str | None = None


def build_injected(injected: Injected) -> str:
    """The annotation's text, compact JSON."""
    fields: dict[str, Any] = {
        "version": injected.version,
        "policy": injected.policy,
        "generation": injected.generation,
        "containers": list(injected.containers),
        "marks": list(injected.marks),
    }
    if injected.owner_uid is not None:
        fields["owner"] = injected.owner_uid
    return json.dumps(fields, separators=(",", ":"))


def parse_injected(annotations: Mapping[str, str]) -> Injected | None:
    """The note of a pod; None when there is none, or when it was edited into something else."""
    text = annotations.get(keys.INJECTED_ANNOTATION, "")
    if len(text) > MAX_NOTE:
        return None
    try:
        fields = json.loads(text)
        return Injected(
            version=str(fields["version"]),
            policy=str(fields["policy"]),
            generation=int(fields["generation"]),
            containers=tuple(map(str, fields["containers"])),
            # Only marks of ours: the text may have been edited, and a release removes these.
            marks=tuple(mark for mark in fields["marks"] if mark in MARKS),
            owner_uid=str(fields["owner"]) if "owner" in fields else None,
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


MARKS = {
    keys.SAFE_TO_EVICT_ANNOTATION: "false",
    keys.DO_NOT_DISRUPT_ANNOTATION: "true",
}
"""Annotations of a held pod, and their values while it is held."""
