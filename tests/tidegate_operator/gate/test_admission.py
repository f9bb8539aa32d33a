"""Reviews answered by what the replica knows, from the watch's record to the webhook's answer."""

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.keys import DrainState
from tidegate_operator.gate.admission import AdmissionEndpoints
from tidegate_operator.gate.facts import Drain
from tidegate_operator.gate.metrics import Metrics
from tidegate_operator.gate.observe import Release, observe_run
from tidegate_operator.gate.records import build_drains, slim_node, slim_pod, slim_policy, slim_run
from tidegate_operator.gate.sidecar import GateAddress
from tidegate_operator.gate.world import World
from tidegate_operator.kube.kinds import Key
from tidegate_operator.kube.watch import Change, ChangeType
from tidegate_operator.settings import DrainSettings

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
RUN = Key("team-a", "train")
ADDRESS = GateAddress(url="https://10.0.0.1:443", server_name="gate.svc", authority="PEM")


def added(key: Key, record: Any) -> Change[Any]:
    return Change(type=ChangeType.ADDED, key=key, old=None, new=record)


def a_review(kind_of: Any, **changes: Any) -> dict[str, Any]:
    request = {"uid": "u1", "namespace": "team-a", "object": kind_of, "dryRun": False}
    return {"request": request | changes}


def a_run(version: int = 5, **parts: Any) -> dict[str, Any]:
    metadata = {"name": "train", "namespace": "team-a", "uid": "r"}
    return {"metadata": metadata | {"resourceVersion": str(version)}} | parts


@pytest.fixture
def world(a_policy: Any) -> World:
    world = World()
    world.on_policy(added(Key("team-a", "default"), slim_policy(a_policy())))
    return world


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def endpoints(world: World, metrics: Metrics, some_settings: Any) -> AdmissionEndpoints:
    release = Release(version="0.1.0", gate=ADDRESS)
    return AdmissionEndpoints(world, some_settings(), release, metrics)


@pytest.fixture
def admitted(endpoints: AdmissionEndpoints, apply_patch: Any) -> Any:
    """The pod after its admission, bound and running, as a watch shows it."""

    def run(pod: Any, name: str = "train-0-a", node: str = "node-1") -> dict[str, Any]:
        response = endpoints.inject(a_review(pod))["response"]
        after: dict[str, Any] = apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
        after["metadata"] |= {"name": name, "namespace": "team-a", "uid": f"uid-{name}"}
        after["spec"]["nodeName"], after["status"]["phase"] = node, "Running"
        return after

    return run


def watch_pod(world: World, raw: Any) -> None:
    record = slim_pod(raw)
    world.on_pod(added(record.key, record))


def test_pod_is_patched_by_its_namespaces_policy(endpoints: Any, a_pod: Any) -> None:
    response = endpoints.inject(a_review(a_pod()))["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == (
        "u1",
        True,
        "JSONPatch",
    )
    assert keys.SIDECAR_CONTAINER in base64.b64decode(response["patch"]).decode()


@pytest.mark.parametrize(
    ("shape", "label", "sentence"),
    [
        pytest.param("bare", "other", "has no CheckpointPolicy 'other'", id="unknown-policy"),
        pytest.param("replicaset", "default", "set the label tidegate.io/run", id="nameless"),
    ],
)
def test_pod_that_cannot_be_injected_is_admitted_with_a_warning(
    shape: str, label: str, sentence: str, endpoints: Any, a_pod: Any
) -> None:
    pod = a_pod(shape)
    pod["metadata"]["labels"][keys.POLICY_LABEL] = label
    response = endpoints.inject(a_review(pod))["response"]
    assert (response["allowed"], "patch" in response) == (True, False)
    assert sentence in response["warnings"][0]
    assert len(response["warnings"][0]) <= 256


def test_pod_is_admitted_though_the_injector_breaks(
    endpoints: Any, metrics: Metrics, a_pod: Any
) -> None:
    pod = a_pod(containers="not a list")
    response = endpoints.inject(a_review(pod))["response"]
    assert (response["allowed"], "patch" in response) == (True, False)
    assert "an internal error" in response["warnings"][0]
    assert b'injections_total{result="failed"} 1.0' in metrics.text()


def test_pod_of_a_second_live_owner_is_refused(
    endpoints: Any, world: World, a_pod: Any, admitted: Any
) -> None:
    watch_pod(world, admitted(a_pod()))
    assert endpoints.inject(a_review(a_pod()))["response"]["allowed"] is True
    other = a_pod()
    other["metadata"]["labels"][keys.JOB_UID_LABEL] = "another-job"
    response = endpoints.inject(a_review(other))["response"]
    assert response["allowed"] is False
    assert "run team-a/train has live pods of another workload" in response["status"]["message"]


def test_pod_of_a_new_owner_is_admitted_once_the_first_ones_pods_are_over(
    endpoints: Any, world: World, a_pod: Any, admitted: Any
) -> None:
    raw = admitted(a_pod())
    raw["status"]["phase"] = "Failed"
    watch_pod(world, raw)
    other = a_pod()
    other["metadata"]["labels"][keys.JOB_UID_LABEL] = "another-job"
    assert endpoints.inject(a_review(other))["response"]["allowed"] is True


def test_replacement_prefers_the_node_of_its_index_after_the_old_pod_has_gone(
    endpoints: Any, world: World, a_pod: Any, admitted: Any
) -> None:
    raw = admitted(a_pod(), node="node-7")
    watch_pod(world, raw)
    record = slim_pod(raw)
    world.on_pod(Change(type=ChangeType.DELETED, key=record.key, old=record, new=None))
    patch = base64.b64decode(endpoints.inject(a_review(a_pod()))["response"]["patch"]).decode()
    assert '"values":["node-7"]' in patch
    second = a_pod()
    second["metadata"]["labels"][keys.JOB_INDEX_LABEL] = "1"
    patch = base64.b64decode(endpoints.inject(a_review(second))["response"]["patch"]).decode()
    assert "node-7" not in patch


def test_replacement_takes_the_tiers_that_its_run_is_pinned_to(
    endpoints: Any, world: World, a_pod: Any
) -> None:
    tiers = {"local": "EmptyDir", "remote": "claim/old", "path": "x/team-a/train"}
    world.on_run(added(RUN, slim_run(a_run(status={"tiers": tiers}))))
    patch = base64.b64decode(endpoints.inject(a_review(a_pod()))["response"]["patch"]).decode()
    assert '"persistentVolumeClaim":{"claimName":"old"}' in patch
    assert "/tidegate/remote/x/team-a/train" in patch


def test_run_that_turned_drains_off_is_not_held_from_its_next_pod_on(
    endpoints: Any, world: World, a_pod: Any
) -> None:
    world.on_run(added(RUN, slim_run(a_run(spec={"drainMode": "Off"}))))
    patch = base64.b64decode(endpoints.inject(a_review(a_pod()))["response"]["patch"]).decode()
    assert "tidegate.io~1hold" not in patch


def test_eviction_of_a_held_pod_is_refused_and_remembered_once(
    endpoints: Any, world: World, a_pod: Any, admitted: Any
) -> None:
    watch_pod(world, admitted(a_pod()))
    world.on_run(added(RUN, slim_run(a_run())))
    review = a_review({"kind": "Eviction"}, name="train-0-a", userInfo={"username": "admin"})
    first = endpoints.evict(review)["response"]
    assert (first["allowed"], first["status"]["code"]) == (False, 429)
    (eviction,) = world.evictions[RUN].values()
    endpoints.evict(review)
    assert world.evictions[RUN] == {"node-1": eviction}
    assert RUN in world.take_stirred()
    facts = observe_run(world, DrainSettings(), RUN, NOW)
    assert facts is not None
    assert facts.evictions == {"node-1": eviction}


def test_eviction_is_forgotten_once_status_tells_of_it(
    endpoints: Any, world: World, a_pod: Any, admitted: Any
) -> None:
    watch_pod(world, admitted(a_pod()))
    world.on_run(added(RUN, slim_run(a_run())))
    endpoints.evict(a_review({"kind": "Eviction"}, name="train-0-a"))
    drain = Drain(
        node="node-1",
        node_uid="",
        state=DrainState.REQUESTED,
        reason="Evicted",
        requested_at=NOW,
        deadline=NOW,
    )
    world.on_run(added(RUN, slim_run(a_run(6, status={"drains": build_drains([drain])}))))
    assert RUN not in world.evictions


def test_eviction_of_what_is_not_ours_passes(endpoints: Any, world: World) -> None:
    response = endpoints.evict(a_review({"kind": "Eviction"}, name="nginx"))["response"]
    assert response == {"uid": "u1", "allowed": True}
    assert world.evictions == {}


def test_eviction_that_cannot_be_judged_passes_to_the_budget(
    endpoints: Any, metrics: Metrics
) -> None:
    review = {"request": {"uid": "u1", "object": "not an Eviction"}}
    assert endpoints.evict(review)["response"] == {"uid": "u1", "allowed": True}
    assert b'evictions_total{verdict="Failed"} 1.0' in metrics.text()


def test_run_record_older_than_our_own_write_is_passed_over(world: World) -> None:
    world.keep_run(RUN, slim_run(a_run(9)))
    world.on_run(added(RUN, slim_run(a_run(7))))
    assert world.runs[RUN].version == 9


def test_run_observes_the_nodes_of_its_pods_and_of_its_drains(
    world: World, a_pod: Any, admitted: Any
) -> None:
    watch_pod(world, admitted(a_pod()))
    world.on_run(added(RUN, slim_run(a_run())))
    for name in ("node-1", "node-2"):
        raw = {"metadata": {"name": name, "uid": "u"}, "spec": {"unschedulable": True}}
        world.on_node(added(Key("", name), slim_node(raw)))
    seen = world.drained_since["node-1"]
    facts = observe_run(world, DrainSettings(), RUN, seen)
    assert facts is not None
    assert facts.nodes.keys() == {"node-1"}
    # no taint with a time yet: another replica might read another moment
    assert facts.nodes["node-1"].draining_since is None
    assert RUN in set(world.restless_runs())
