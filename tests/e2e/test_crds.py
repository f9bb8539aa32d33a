"""The cluster API as a real API server keeps it: what it refuses, fills in, prints and explains."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_ground.cluster import Cluster

pytestmark = pytest.mark.ground

REPOSITORY = Path(__file__).parents[2]
NAMES = ("checkpointpolicies.tidegate.io", "checkpointruns.tidegate.io")
REFUSED = yaml.safe_load(
    (REPOSITORY / "tests/tidegate_operator/refused_policies.yaml").read_text(encoding="utf-8")
)
CLAIM = {"type": "Claim", "claimName": "pfs"}
CADENCES: list[dict[str, Any]] = [
    {"by": "Interval", "interval": "10m"},
    {"minInterval": "1m"},
    {"by": "Auto", "auto": {"maxLoss": "10m", "mtbf": "36h"}},
    {"by": "Steps", "steps": 500},
    {"by": "Tokens", "tokens": 1_000_000},
    {},
]
APPLY = {
    "client-side": ("apply", "-f", "-"),
    "server-side": ("apply", "--server-side", "-f", "-"),
}


@pytest.fixture(scope="module", autouse=True)
def crds(cluster: Cluster) -> Iterator[None]:
    """The committed CRDs, served; removed again unless an installation brought them."""
    found = cluster.kubectl("get", "crd", *NAMES, "--ignore-not-found", "-o", "name").stdout
    folder = str(REPOSITORY / "crds")
    cluster.kubectl("apply", "--server-side", "-f", folder)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", folder)
    yield
    if not found:
        # An installation that follows owns the CRDs by Helm, and refuses those it did not make.
        cluster.kubectl("delete", "-f", folder)


def an_object(kind: str, namespace: str, spec: dict[str, Any] | None = None) -> str:
    named = {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "tried", "namespace": namespace},
    }
    return json.dumps(named if spec is None else named | {"spec": spec})


def refusal_of(cluster: Cluster, spec: dict[str, Any]) -> str:
    """What kubectl says of a bad policy. A dry run: nothing is stored should it be accepted."""
    policy = an_object("CheckpointPolicy", "default", spec)
    tried = cluster.kubectl("create", "--dry-run=server", "-f", "-", input=policy, check=False)
    assert tried.returncode == 1, tried.stdout
    return tried.stderr


def laid_over(spec: dict[str, Any]) -> dict[str, Any]:
    """The smallest good spec with fields laid over it; None takes a field away."""
    remote = CLAIM | spec.get("remote", {})
    remote = {name: value for name, value in remote.items() if value is not None}
    return spec | {"remote": remote}


def stored_spec(cluster: Cluster, kind: str, namespace: str) -> dict[str, Any]:
    spec: dict[str, Any] = cluster.get(kind, "tried", "-n", namespace)["spec"]
    return spec


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in REFUSED])
def test_bad_policy_is_refused_naming_the_field(cluster: Cluster, case: dict[str, Any]) -> None:
    refusal = refusal_of(cluster, laid_over(case["spec"]))
    assert f"{case['field']}: " in refusal
    assert case.get("says", "") in refusal


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({"drainn": {}}, 'unknown field "spec.drainn"', id="misspelt-object"),
        pytest.param(
            {"drain": {"maxhold": "5m"}}, 'unknown field "spec.drain.maxhold"', id="misspelt-field"
        ),
        pytest.param({"image": "x"}, 'unknown field "spec.image"', id="what-only-admins-say"),
    ],
)
def test_unknown_field_is_refused_by_its_name(
    cluster: Cluster, spec: dict[str, Any], want: str
) -> None:
    assert want in refusal_of(cluster, laid_over(spec))


def test_policy_without_remote_is_refused(cluster: Cluster) -> None:
    refusal = refusal_of(cluster, {"drain": {"maxHold": "5m"}})
    assert "spec.remote: Required value" in refusal


def test_policy_with_only_a_remote_is_stored_with_all_defaults(
    cluster: Cluster, namespace: str
) -> None:
    policy = an_object("CheckpointPolicy", namespace, {"remote": CLAIM, "drain": None})
    cluster.kubectl("create", "-f", "-", input=policy)

    spec = stored_spec(cluster, "cpol", namespace)

    assert spec["cadence"] == {"by": "Tokens", "minInterval": "0s"}
    assert spec["local"] == {"type": "Tier", "highWatermarkPercent": 85, "keep": 2}
    assert spec["remote"] == CLAIM | {
        "every": 1,
        "keep": 3,
        "keepEverySteps": 0,
        "filesPerNode": 4,
        "nodesAtOnce": 0,
        "stallTimeout": "2m",
    }
    assert spec["drain"] == {
        "mode": "Enforce",
        "freshness": "60s",
        "maxHold": "10m",
        "onDeadline": "Release",
        "gracePeriod": "2m",
    }
    assert spec["sidecar"] == {"metricsPort": 9464}
    assert spec["historyTTL"] == "720h"


@pytest.mark.parametrize("apply", [pytest.param(verb, id=name) for name, verb in APPLY.items()])
def test_cadence_can_be_switched_to_every_kind(
    cluster: Cluster, namespace: str, apply: tuple[str, ...]
) -> None:
    cluster.kubectl(*apply, input=an_object("CheckpointPolicy", namespace, {"remote": CLAIM}))

    for cadence in CADENCES:
        policy = an_object("CheckpointPolicy", namespace, {"remote": CLAIM, "cadence": cadence})
        cluster.kubectl(*apply, input=policy)
        stored = stored_spec(cluster, "cpol", namespace)["cadence"]
        assert stored == {"by": "Tokens", "minInterval": "0s"} | cadence


def test_run_without_spec_inherits_its_policy(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "-f", "-", input=an_object("CheckpointRun", namespace))
    assert stored_spec(cluster, "crun", namespace) == {"drainMode": "Inherit"}


def test_durable_time_going_back_is_refused(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "-f", "-", input=an_object("CheckpointRun", namespace))

    def report(step: int, time: str) -> tuple[int, str]:
        status = {"status": {"lastDurable": {"step": step, "time": time}}}
        patched = cluster.kubectl(
            *("patch", "crun", "tried", "-n", namespace, "--subresource=status"),
            *("--type=merge", "-p", json.dumps(status)),
            check=False,
        )
        return patched.returncode, patched.stderr

    assert report(200, "2026-01-02T10:00:00Z") == (0, "")
    # A rollback: the step falls, the time goes on.
    assert report(100, "2026-01-02T10:00:05Z") == (0, "")
    code, refusal = report(300, "2026-01-02T09:00:00Z")
    assert code == 1
    assert "lastDurable.time never goes back" in refusal


def test_listing_both_kinds_reads_as_a_status_page(cluster: Cluster, namespace: str) -> None:
    policy = an_object("CheckpointPolicy", namespace, {"remote": CLAIM})
    cluster.kubectl("create", "-f", "-", input=policy)
    cluster.kubectl("create", "-f", "-", input=an_object("CheckpointRun", namespace))

    lines = cluster.kubectl("get", "tidegate", "-n", namespace).stdout.splitlines()

    headings = [line.split() for line in lines if line.startswith("NAME")]
    assert headings == [
        ["NAME", "REMOTE", "RUNS", "PODS", "MISSED", "READY", "REASON", "AGE"],
        ["NAME", "STEP", "DURABLE", "SAVED", "BACKLOG", "DRAIN", "READY", "REASON", "AGE"],
    ]


@pytest.mark.parametrize(
    "field",
    [
        "checkpointpolicy.spec",
        "checkpointpolicy.spec.cadence.auto",
        "checkpointpolicy.spec.drain",
        "checkpointpolicy.spec.remote",
        "checkpointpolicy.status.conditions",
        "checkpointrun.spec.restore",
        "checkpointrun.status",
        "checkpointrun.status.drains",
    ],
)
def test_explain_describes_every_field(cluster: Cluster, field: str) -> None:
    explained = cluster.kubectl("explain", field).stdout
    assert "DESCRIPTION:" in explained
    assert "<empty>" not in explained
    assert "<no description>" not in explained
