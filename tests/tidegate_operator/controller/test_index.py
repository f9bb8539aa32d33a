from collections.abc import Callable
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_operator.controller.facts import slim_budget
from tidegate_operator.controller.index import PodIndex
from tidegate_operator.kube.kinds import Key

Build = Callable[..., Any]
RUN = Key("team-a", "llama")


def test_index_follows_a_pod_from_creation_to_its_end(a_pod: Build) -> None:
    index = PodIndex()
    pending, bound = a_pod(phase="Pending", node=""), a_pod()
    index.update(None, pending)
    assert index.of_run(RUN) == (pending,)
    assert index.runs_on("node-1") == set()
    index.update(pending, bound)
    assert index.of_run(RUN) == index.of_policy(Key("team-a", "default")) == (bound,)
    assert index.runs_on("node-1") == {RUN}
    assert index.runs_in("team-a") == {RUN}
    index.update(bound, None)
    assert (index.of_run(RUN), index.runs_on("node-1"), index.runs()) == ((), set(), ())


def test_index_node_has_only_runs_with_live_injected_pods(a_pod: Build) -> None:
    index = PodIndex()
    index.update(None, a_pod("a", phase="Succeeded"))
    index.update(None, a_pod("b", injected=False))
    assert index.runs_on("node-1") == set()


def test_pod_record_of_an_api_object(a_pod: Build) -> None:
    pod = a_pod(labels={keys.RUN_LABEL: None}, metadata={"generateName": "x-"})
    assert (pod.run, pod.is_nameless, pod.is_held) == (None, True, True)
    assert a_pod(metadata={"deletionTimestamp": "x"}).is_terminating
    assert not a_pod(phase="Failed").is_bound


@pytest.mark.parametrize(
    ("name", "labels", "want"),
    [
        ("tidegate-llama", {keys.MANAGED_BY_LABEL: "tidegate", keys.RUN_LABEL: "llama"}, "llama"),
        ("tidegate-llama", {keys.RUN_LABEL: "llama"}, ""),
        ("other", {keys.MANAGED_BY_LABEL: "tidegate", keys.RUN_LABEL: "llama"}, ""),
        ("other", {}, ""),
    ],
    ids=["ours", "not marked", "another name", "foreign"],
)
def test_budget_record_is_ours_by_mark_and_name(name: str, labels: Any, want: str) -> None:
    raw = {"metadata": {"namespace": "n", "name": name, "uid": "u", "labels": labels}, "spec": {}}
    assert slim_budget(raw).run == want
