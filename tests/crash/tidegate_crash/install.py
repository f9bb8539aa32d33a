"""Puts the simulated calls into production: which modules, and how.

The modules below are all that touch files on the way from a seal to a restore; a test holds the
list against the sources. Production itself is not changed.
"""

import fcntl
import importlib
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any, Self

from tidegate_contract import document
from tidegate_crash import calls
from tidegate_crash.process import World

MODULES = (
    "tidegate_contract.folder",
    "tidegate_contract.publish",
    "tidegate_contract.run_documents",
    "tidegate_contract.scan",
    "tidegate_sidecar.adopt",
    "tidegate_sidecar.folders",
    "tidegate_sidecar.lock",
    "tidegate_sidecar.observe",
    "tidegate_sidecar.pinning",
    "tidegate_sidecar.removal",
    "tidegate_sidecar.tasks",
    "tidegate_sidecar.transfer",
)
"""Production that touches files."""
_ACTING = ("actors", "flusher", "invariants", "restoring", "scenarios", "stage", "truth")
"""Of this package: what plays processes; it must not leave the disk either."""
BUFFER_BYTES = 4096
"""Of a copy: small, so that the files of a scenario are written in several calls."""


class InlineExecutor:
    """A pool of threads whose work is done at once: one process is one sequence of calls."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Starts no thread."""

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        """Does the work; a death is nobody's exception but ours."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # as a pool does: the caller asks for it
            future.set_exception(error)
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing is left to do."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Nothing is left to do."""


class _Documents:
    """Parsing and writing of documents, each done once: it is half of the work of a run."""

    def __init__(self) -> None:
        self._decoded: dict[tuple[type, bytes], object] = {}
        self._encoded: dict[object, bytes] = {}

    def decode(self, cls: type[Any], data: bytes, where: str) -> Any:
        """As `document.decode`; one that is refused is parsed again, for its sentence."""
        found = self._decoded.get((cls, data))
        if found is None:
            found = self._decoded[cls, data] = document.decode(cls, data, where)
        return found

    def encode(self, value: object) -> bytes:
        """As `document.encode`."""
        found = self._encoded.get(value)
        if found is None:
            found = self._encoded[value] = document.encode(value)
        return found


def _stand_ins(world: World) -> dict[str, tuple[Any, Any]]:
    documents = _Documents()
    return {
        "decode": (document.decode, documents.decode),
        "encode": (document.encode, documents.encode),
        "os": (os, calls.SimulatedOs(world)),
        "fcntl": (fcntl, calls.SimulatedFcntl(world)),
        "secrets": (secrets, calls.SimulatedSecrets(world)),
        "time": (time, calls.SimulatedTime(world)),
        "uuid": (uuid, calls.SimulatedUuid(world)),
        "ThreadPoolExecutor": (ThreadPoolExecutor, InlineExecutor),
    }


def _modules() -> list[ModuleType]:
    acting = (sys.modules.get(f"tidegate_crash.{name}") for name in _ACTING)
    return [*map(importlib.import_module, MODULES), *filter(None, acting)]


@contextmanager
def installed() -> Iterator[World]:
    """Production works on simulated disks meanwhile, as the process that the world runs."""
    world = World()
    replaced: list[tuple[ModuleType, str, Any]] = []
    try:
        stand_ins = _stand_ins(world)
        for module in _modules():
            for name, (real, simulated) in stand_ins.items():
                if getattr(module, name, None) is real:
                    replaced.append((module, name, real))
                    setattr(module, name, simulated)
        transfer: Any = sys.modules["tidegate_sidecar.transfer"]
        replaced.append((transfer, "_BUFFER_BYTES", transfer._BUFFER_BYTES))
        transfer._BUFFER_BYTES = BUFFER_BYTES
        yield world
    finally:
        for module, name, real in reversed(replaced):
            setattr(module, name, real)
