"""A JSON patch (RFC 6902) of one pod that makes the parents it needs. Pure."""

from collections.abc import Mapping
from typing import Any

Path = tuple[str | int, ...]


class PodPatch:
    """Collects operations in the order they apply; the pod itself is never changed.

    Attributes:
        operations: what the API server applies.
    """

    def __init__(self, pod: Mapping[str, Any]) -> None:
        """Begins an empty patch of `pod`, as the API server showed it."""
        self.operations: list[dict[str, Any]] = []
        self._pod = pod
        self._made: set[Path] = set()

    def add(self, path: Path, value: Any) -> None:
        """Adds a member that the pod lacks; missing parents are added first."""
        self._make_parents(path)
        self._operate("add", path, value=value)

    def append(self, path: Path, value: Any) -> None:
        """Appends to a list, which is added first when it is missing."""
        self.add((*path, "-"), value)

    def replace(self, path: Path, value: Any) -> None:
        """Changes a member that the pod has."""
        self._operate("replace", path, value=value)

    def remove(self, path: Path) -> None:
        """Removes a member that the pod has."""
        self._operate("remove", path)

    def _make_parents(self, path: Path) -> None:
        for length in range(1, len(path)):
            parent = path[:length]
            if parent not in self._made and find(self._pod, parent) is None:
                self._operate("add", parent, value=[] if path[length] == "-" else {})
                self._made.add(parent)

    def _operate(self, operation: str, path: Path, **rest: Any) -> None:
        self.operations.append({"op": operation, "path": _pointer(path), **rest})


def find(document: Any, path: Path) -> Any:
    """The value at a path; None when any part of the path is missing."""
    for part in path:
        if isinstance(document, Mapping):
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return None
    return document


def _pointer(path: Path) -> str:
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
    return "".join(f"/{part}" for part in parts)
