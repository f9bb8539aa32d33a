from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_operator.api import CheckpointPolicy, parse_policy
from tidegate_operator.api_run import CheckpointRun, parse_run
from tidegate_operator.controller.facts import Pod, slim_pod
from tidegate_operator.settings import Settings, parse_settings

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)

SETTINGS = """
{"namespace": "tidegate-system", "sidecar": {"image": "tidegate/sidecar:1"},
 "tiers": {"local": [{"name": "nvme", "path": "/var/lib/tidegate"}],
           "remote": [{"name": "pfs", "hostPath": "/mnt/pfs"}]}}
"""


@pytest.fixture
def now() -> datetime:
    return NOW


@pytest.fixture
def ago() -> Callable[[float], datetime]:
    return lambda seconds: NOW - timedelta(seconds=seconds)


@pytest.fixture
def settings() -> Settings:
    return parse_settings(SETTINGS, "settings")


def raw_pod(name: str = "pod-0", **over: Any) -> dict[str, Any]:
    """A running, injected, held pod of run `llama` on `node-1`, as the API server serves it."""
    labels = {
        keys.POLICY_LABEL: "default",
        keys.RUN_LABEL: "llama",
        keys.HOLD_LABEL: keys.HOLD_VALUE,
        **over.pop("labels", {}),
    }
    metadata: dict[str, Any] = {
        "namespace": "team-a",
        "name": name,
        "uid": f"uid-{name}",
        "labels": {key: value for key, value in labels.items() if value is not None},
        "creationTimestamp": "2026-11-29T11:00:00Z",
    }
    if over.pop("injected", True):
        metadata["annotations"] = {keys.INJECTED_ANNOTATION: "{}"}
    metadata |= over.pop("metadata", {})
    phase, node = over.pop("phase", "Running"), over.pop("node", "node-1")
    started = over.pop("started", "2026-11-29T11:00:05Z")
    assert not over, over
    return {
        "metadata": metadata,
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase} | ({"startTime": started} if started else {}),
    }


@pytest.fixture
def a_raw_pod() -> Callable[..., dict[str, Any]]:
    return raw_pod


@pytest.fixture
def a_pod() -> Callable[..., Pod]:
    return lambda *name, **over: slim_pod(raw_pod(*name, **over))


@pytest.fixture
def a_policy() -> Callable[..., CheckpointPolicy]:
    """A policy; keywords are fields of its spec."""

    def build(**spec: Any) -> CheckpointPolicy:
        return parse_policy(
            {
                "metadata": {"namespace": "team-a", "name": "default", "generation": 3},
                "spec": {"remote": {"type": "Tier", "tier": "pfs"}, **spec},
            }
        )

    return build


@pytest.fixture
def a_run() -> Callable[..., CheckpointRun]:
    """A run; `spec` is its spec, other keywords are status fields."""

    def build(spec: dict[str, Any] | None = None, **status: Any) -> CheckpointRun:
        return parse_run(
            {
                "metadata": {"namespace": "team-a", "name": "llama", "generation": 2},
                "spec": spec or {},
                "status": status,
            }
        )

    return build
