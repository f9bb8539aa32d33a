from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_contract.keys import DrainState
from tidegate_operator.gate.facts import Drain
from tidegate_operator.gate.inject import build_patch
from tidegate_operator.gate.injected import Injected, build_injected, parse_injected
from tidegate_operator.gate.records import build_drains, slim_node, slim_pod, slim_policy, slim_run
from tidegate_operator.kube.kinds import Key

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)


def a_run(**parts: Any) -> dict[str, Any]:
    return {"metadata": {"name": "r", "namespace": "ns", "resourceVersion": "7"}} | parts


@pytest.mark.parametrize("state", DrainState)
@pytest.mark.parametrize("released", [None, NOW])
def test_drains_read_back_as_they_were_written(
    state: DrainState, released: datetime | None
) -> None:
    drain = Drain(
        node="a",
        node_uid="u",
        state=state,
        reason="Why",
        requested_by="x",
        requested_at=NOW,
        deadline=NOW,
        released_at=released,
        message="m",
    )
    assert slim_run(a_run(status={"drains": build_drains([drain])})).drains == (drain,)


@pytest.mark.parametrize(
    ("spec", "status", "want"),
    [
        pytest.param({}, {}, "", id="none"),
        pytest.param({"saveRequest": "a"}, {}, "a", id="new"),
        pytest.param({"saveRequest": "a"}, {"value": "a", "result": "Saving"}, "a", id="open"),
        pytest.param({"saveRequest": "a"}, {"value": "a", "result": "Sealed"}, "", id="answered"),
        pytest.param({"saveRequest": "b"}, {"value": "a", "result": "Durable"}, "b", id="next"),
    ],
)
def test_run_save_request_is_open_until_it_is_answered(spec: Any, status: Any, want: str) -> None:
    raw = a_run(spec=spec, status={"saveRequest": status} if status else {})
    assert slim_run(raw).save_value == want


def test_run_whose_pods_another_budget_selects_is_in_conflict() -> None:
    condition = {"type": "Held", "status": "False", "reason": "PDBConflict", "message": "m"}
    condition["lastTransitionTime"] = "2026-11-29T12:00:00Z"
    assert slim_run(a_run(status={"conditions": [condition]})).is_conflicted
    other = condition | {"reason": "Idle"}
    assert not slim_run(a_run(status={"conditions": [other]})).is_conflicted


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, (False, None), id="takes-pods"),
        pytest.param({"unschedulable": True}, (True, None), id="cordoned-just-now"),
        pytest.param(
            {
                "unschedulable": True,
                "taints": [
                    {
                        "key": "node.kubernetes.io/unschedulable",
                        "timeAdded": "2026-11-29T12:00:00Z",
                    }
                ],
            },
            (True, datetime(2026, 11, 29, 12, tzinfo=UTC)),
            id="cordoned",
        ),
        pytest.param({"taints": [{"key": "karpenter.sh/disrupted"}]}, (True, None), id="drainer"),
        pytest.param({"taints": [{"key": "nvidia.com/gpu"}]}, (False, None), id="other-taint"),
    ],
)
def test_node_is_draining_when_cordoned_or_marked(spec: Any, want: Any) -> None:
    node = slim_node({"metadata": {"name": "a", "uid": "u"}, "spec": spec})
    assert (node.is_draining, node.marked_at) == want


def test_node_record_ignores_heartbeats() -> None:
    raw = {"metadata": {"name": "a", "uid": "u"}, "spec": {}, "status": {"conditions": [1]}}
    assert slim_node(raw) == slim_node(raw | {"status": {}})


def test_pod_after_its_injection_belongs_to_its_run(
    a_pod: Any, an_injection: Any, apply_patch: Any
) -> None:
    pod = a_pod()
    pod = apply_patch(pod, build_patch(pod, an_injection(pod)).operations)
    pod["metadata"] |= {"name": "train-0-x", "namespace": "team-a", "uid": "u"}
    pod["spec"]["nodeName"], pod["status"]["phase"] = "node-1", "Running"
    record = slim_pod(pod)
    assert record.run == Key("team-a", "train")
    assert (record.facts.node, record.facts.is_running, record.facts.has_hold) == (
        "node-1",
        True,
        True,
    )
    assert record.place == "train/0"


def test_pod_that_was_missed_belongs_to_no_run(a_pod: Any) -> None:
    pod = a_pod()
    pod["metadata"] |= {"name": "x", "namespace": "ns"}
    pod["metadata"]["labels"][keys.RUN_LABEL] = "train"
    assert slim_pod(pod).run is None


def test_policy_with_a_bad_field_is_refused_by_name(a_policy: Any) -> None:
    with pytest.raises(Reject, match=r"spec\.drain\.maxHold"):
        slim_policy(a_policy(drain={"maxHold": "soon"}))


def test_injected_note_reads_back() -> None:
    note = Injected(
        version="1",
        policy="p",
        generation=2,
        containers=("a", "b"),
        marks=(keys.DO_NOT_DISRUPT_ANNOTATION,),
        owner_uid="o",
    )
    assert parse_injected({keys.INJECTED_ANNOTATION: build_injected(note)}) == note


NOTE = '{"version":"1","policy":"p","generation":1,"containers":[],"marks":[]}'
EDITED = {
    "empty": "",
    "no-fields": "{}",
    "list": "[]",
    "null": "null",
    "one-field": '{"version": 1}',
    "no-json": "x" * 10,
    "deeper-than-python-goes": "[" * 5000,
    "deep-field": NOTE.replace("1,", "[" * 900 + "]" * 900 + ","),
    "deep-and-long": "[" * 200_000,
    "long": NOTE.replace('"p"', f'"{"p" * 20_000}"'),
    "infinite": NOTE.replace(":1,", ":1e999,"),
    "many-digits": NOTE.replace(":1,", f":{'1' * 5000},"),
    "list-for-a-mark": NOTE.replace('"marks":[]', '"marks":[[]]'),
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in EDITED.items()])
def test_injected_note_edited_into_something_else_counts_as_none(text: str) -> None:
    assert parse_injected({keys.INJECTED_ANNOTATION: text}) is None


def test_injected_note_cannot_make_us_lift_a_foreign_annotation() -> None:
    text = '{"version":"1","policy":"p","generation":1,"containers":[],"marks":["a/b"]}'
    note = parse_injected({keys.INJECTED_ANNOTATION: text})
    assert note is not None
    assert note.marks == ()
