from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract.keys import DrainState
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import AnswerResult, Phase, SaveAnswer
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.effective import HoldLimits
from tidegate_operator.gate.asks import request_id
from tidegate_operator.gate.facts import (
    Drain,
    Durable,
    Eviction,
    LeadReport,
    NodeFacts,
    PodFacts,
    RunFacts,
)
from tidegate_operator.gate.hold import Decision, LabelChange, decide

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
RUN = "team-a/llama"
LIMITS = HoldLimits(
    max_hold=timedelta(minutes=10),
    freshness=timedelta(seconds=60),
    contact_timeout=timedelta(seconds=60),
    release_ttl=timedelta(minutes=3),
    blocks_at_deadline=False,
)
SAVED = Attempt(step=120, nonce="00000000000000aa")
REQUESTED, SAVING, FLUSHING = DrainState.REQUESTED, DrainState.SAVING, DrainState.FLUSHING
RELEASED, EXPOSED = DrainState.RELEASED, DrainState.EXPOSED


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def a_pod(name: str = "p0", node: str = "a", **changes: Any) -> PodFacts:
    fields: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "node": node, "has_hold": True}
    flags = {"is_running": True, "is_over": False, "is_terminating": False}
    return PodFacts(**fields | flags | changes)


def a_node(name: str = "a", drained: float | None = None) -> NodeFacts:
    since = None if drained is None else ago(drained)
    return NodeFacts(name=name, uid=f"uid-{name}", draining_since=since)


def a_drain(state: DrainState, requested: float = 20, node: str = "a", **changes: Any) -> Drain:
    fields: dict[str, Any] = {
        "node": node,
        "node_uid": f"uid-{node}",
        "state": state,
        "reason": "Evicted",
        "requested_by": "admin",
        "requested_at": ago(requested),
        "deadline": ago(requested) + LIMITS.max_hold,
    }
    return Drain(**fields | changes)


def a_release(reason: str = "Durable", released: float = 10, **changes: Any) -> Drain:
    return a_drain(RELEASED, 60, reason=reason, released_at=ago(released), **changes)


def a_report(age: float = 1, step: int = 130, **changes: Any) -> LeadReport:
    fields: dict[str, Any] = {"received_at": ago(age), "phase": Phase.TRAINING, "step": step}
    fields["stated_at"] = ago(age)
    return LeadReport(**fields | changes)


def an_answer(
    result: str, failures: int = 0, attempt: Attempt | None = None, asked: float = 20
) -> SaveAnswer:
    return SaveAnswer(
        request_id=request_id(RUN, ago(asked)),
        result=AnswerResult(result),
        attempt=attempt,
        failures=failures,
    )


def a_durable(age: float = 300, step: int = 100, nonce: str = "0" * 16) -> Durable:
    return Durable(step=step, nonce=nonce, at=ago(age))


def an_eviction(node: str = "a", age: float = 0.5) -> dict[str, Eviction]:
    return {node: Eviction(node=node, requested_by="admin", at=ago(age))}


def some_facts(**changes: Any) -> RunFacts:
    """A run of two pods on nodes a and b, training, its newest durable step five minutes old."""
    fields: dict[str, Any] = {
        "name": RUN,
        "mode": DrainMode.ENFORCE,
        "limits": LIMITS,
        "nodes": {"a": a_node("a"), "b": a_node("b")},
        "pods": (a_pod("p0", "a"), a_pod("p1", "b")),
        "durable": a_durable(),
        "report": a_report(),
        "last_report_at": ago(5),
    }
    return RunFacts(**fields | changes)


def drained(seconds: float = 20) -> Mapping[str, NodeFacts]:
    return {"a": a_node("a", seconds), "b": a_node("b")}


def state_of(decision: Decision, node: str = "a") -> str:
    found = {drain.node: drain for drain in decision.drains}.get(node)
    return f"{found.state} {found.reason}" if found else "Held"


WAITS, SAVES, FLUSHES = ((a_drain(state),) for state in (REQUESTED, SAVING, FLUSHING))
AT_DEADLINE = {state: (a_drain(state, 600),) for state in (REQUESTED, SAVING, FLUSHING)}
EXPOSES = (a_drain(EXPOSED, 700),)
SEALED = a_report(answer=an_answer("Sealed", 0, SAVED))
DURABLE_NOW = a_durable(age=2, step=SAVED.step, nonce=SAVED.nonce)
RESTORED = Attempt(step=100, nonce="0" * 16)
NOBODY = (a_pod("p1", "b"),)
LEAVING = (a_pod("p0"), a_pod("p2", is_terminating=True))
BLOCKING = replace(LIMITS, blocks_at_deadline=True)


def releases(released: float, reason: str = "Durable", **changes: Any) -> tuple[Drain, ...]:
    return (a_release(reason, released, **changes),)


def reported(result: str, failures: int = 0, asked: float = 20, **changes: Any) -> LeadReport:
    attempt = SAVED if result == "Sealed" else None
    return a_report(answer=an_answer(result, failures, attempt, asked), **changes)


OLD_STATE = a_report(step=100, stated_at=ago(30))
ACKNOWLEDGED = a_report(step=120, answer=an_answer("Acknowledged", attempt=SAVED))
NOTHING, STAYS, LATE = "Released NothingToLose", "Released Durable", "Released DeadlineExceeded"
WAITING, SAVING_NOW = "Requested Evicted", "Saving Acknowledged"
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "held-stays-held": ({}, "Held"),
    "held-evicted": ({"evictions": an_eviction()}, WAITING),
    "held-evicted-before-any-report": (
        {"evictions": an_eviction(), "report": None, "last_report_at": None},
        NOTHING,
    ),
    "held-cordoned-within-maxhold": ({"nodes": drained(599)}, "Held"),
    "held-cordoned-for-maxhold": ({"nodes": drained(600)}, "Exposed NoEviction"),
    "requested-waits": ({"drains": WAITS}, WAITING),
    "requested-restoring": ({"drains": WAITS, "report": a_report(phase=Phase.RESTORING)}, NOTHING),
    "requested-no-trainer": ({"drains": WAITS, "report": a_report(phase=None, step=None)}, NOTHING),
    "requested-progress-is-durable": ({"drains": WAITS, "report": a_report(step=100)}, NOTHING),
    "requested-progress-was-durable-once": ({"drains": WAITS, "report": OLD_STATE}, WAITING),
    "requested-idle-before-the-eviction-only": (
        {"drains": WAITS, "report": a_report(age=30, step=100)},
        WAITING,
    ),
    "requested-same-step-of-a-line-rolled-back": (
        {"drains": WAITS, "report": a_report(step=100, restored_at=ago(200))},
        WAITING,
    ),
    "requested-nothing-trained-since-its-restore": (
        {"drains": WAITS, "report": a_report(step=100, restored=RESTORED, restored_at=ago(200))},
        NOTHING,
    ),
    "requested-fresh": ({"drains": WAITS, "durable": a_durable(60)}, "Released Fresh"),
    "requested-stale": ({"drains": WAITS, "durable": a_durable(61)}, WAITING),
    "requested-acknowledged": ({"drains": WAITS, "report": reported("Acknowledged")}, SAVING_NOW),
    "requested-answer-to-another-request": (
        {"drains": WAITS, "report": reported("Acknowledged", asked=500)},
        WAITING,
    ),
    "requested-early-save-of-its-cordon": (
        {"drains": WAITS, "nodes": drained(25), "report": reported("Acknowledged", asked=25)},
        SAVING_NOW,
    ),
    "requested-failed-once-tries-again": (
        {"drains": WAITS, "report": reported("Failed", 1)},
        SAVING_NOW,
    ),
    "requested-not-acknowledged": ({"drains": (a_drain(REQUESTED, 60),)}, "Released Silent"),
    "requested-lead-polls-the-other-replica": (
        {"drains": (a_drain(REQUESTED, 60),), "report": None},
        WAITING,
    ),
    "requested-lead-has-moved-to-the-other-replica": (
        {"drains": (a_drain(REQUESTED, 60),), "report": a_report(age=31)},
        WAITING,
    ),
    "requested-no-replica-hears-the-lead": (
        {"drains": (a_drain(REQUESTED, 60),), "report": None, "last_report_at": ago(60)},
        "Released Silent",
    ),
    "requested-all-at-once": (
        {"drains": WAITS, "report": SEALED, "durable": DURABLE_NOW},
        STAYS,
    ),
    "saving-durable-before-the-seals-are-told": (
        {"drains": SAVES, "report": ACKNOWLEDGED, "durable": DURABLE_NOW},
        STAYS,
    ),
    "saving-sealed": ({"drains": SAVES, "report": SEALED}, "Flushing Sealed"),
    "saving-sealed-after-a-failure": (
        {"drains": SAVES, "report": reported("Sealed", 1)},
        "Flushing Sealed",
    ),
    "saving-nothing-to-save": ({"drains": SAVES, "report": reported("NothingNew")}, NOTHING),
    "saving-failed-twice": (
        {"drains": SAVES, "report": reported("Failed", 2)},
        "Released SaveFailed",
    ),
    "saving-silent-waits-for-its-deadline": (
        {"drains": (a_drain(SAVING, 500),), "report": None},
        "Saving Evicted",
    ),
    "flushing-waits": ({"drains": FLUSHES, "report": SEALED}, "Flushing Sealed"),
    "flushing-committed": ({"drains": FLUSHES, "report": SEALED, "durable": DURABLE_NOW}, STAYS),
    "flushing-a-newer-step-committed": (
        {"drains": FLUSHES, "report": SEALED, "durable": a_durable(2, 150, "bb" * 8)},
        STAYS,
    ),
    "flushing-higher-step-of-an-older-line": (
        {"drains": FLUSHES, "report": SEALED, "durable": a_durable(300, 150, "bb" * 8)},
        "Flushing Sealed",
    ),
    "flushing-outlives-its-trainer": (
        {"drains": FLUSHES, "report": a_report(phase=Phase.RESTORING)},
        "Flushing Evicted",
    ),
    **{
        f"{state}-deadline".lower(): ({"drains": drains, "report": None}, LATE)
        for state, drains in AT_DEADLINE.items()
    },
    **{
        f"{drains[0].state}-pods-gone".lower(): ({"drains": drains, "pods": NOBODY}, NOTHING)
        for drains in (WAITS, SAVES, FLUSHES)
    },
    **{
        f"saving-{mode}".lower(): ({"drains": SAVES, "mode": mode}, "Released Off")
        for mode in (DrainMode.OFF, DrainMode.OBSERVE)
    },
    "saving-blocked-beyond-deadline": (
        {"drains": (a_drain(SAVING, 900),), "limits": BLOCKING, "report": None},
        "Saving Evicted",
    ),
    "released-stays": ({"drains": releases(10), "nodes": drained()}, STAYS),
    "released-pods-gone-for-10-min": ({"drains": releases(600), "pods": NOBODY}, "Held"),
    "released-pods-gone-lately": ({"drains": releases(599), "pods": NOBODY}, STAYS),
    "released-given-up": ({"drains": releases(180)}, "Held"),
    "released-uncordoned": ({"drains": releases(179)}, STAYS),
    "released-still-used": ({"drains": releases(200), "pods": LEAVING}, STAYS),
    "released-trained-on": (
        {"drains": releases(61), "nodes": drained()},
        "Requested StepsBeyondFreshness",
    ),
    "released-idle": (
        {"drains": releases(61), "nodes": drained(), "report": a_report(step=100)},
        STAYS,
    ),
    "released-fresh-again": (
        {"drains": releases(61), "nodes": drained(), "durable": a_durable(30)},
        STAYS,
    ),
    "released-client-may-still-come": ({"drains": releases(20), "nodes": drained()}, STAYS),
    "released-at-deadline-for-good": (
        {"drains": releases(61, "DeadlineExceeded"), "nodes": drained()},
        LATE,
    ),
    "released-clock-over": ({"drains": releases(61, deadline=NOW), "nodes": drained()}, STAYS),
    "exposed-stays": ({"drains": EXPOSES, "nodes": drained(700)}, "Exposed Evicted"),
    "exposed-uncordoned": ({"drains": EXPOSES}, "Held"),
    "exposed-evicted": (
        {"drains": EXPOSES, "nodes": drained(700), "evictions": an_eviction()},
        WAITING,
    ),
    "another-node-of-that-name": ({"drains": (a_drain(SAVING, node_uid="before"),)}, "Held"),
    "observed-run-is-never-held": (
        {"mode": DrainMode.OBSERVE, "evictions": an_eviction(), "nodes": drained(900)},
        "Held",
    ),
}
TABLE = [pytest.param(*row, id=name) for name, row in ROWS.items()]


@pytest.mark.parametrize(("changes", "want"), TABLE)
def test_drain_moves_as_the_state_table_says(changes: Any, want: str) -> None:
    assert state_of(decide(some_facts(**changes), NOW)) == want


@pytest.mark.parametrize(("changes", "want"), TABLE)
def test_drain_transition_is_told_once(changes: Any, want: str) -> None:
    facts = some_facts(**changes)
    before = {drain.node: str(drain.state) for drain in facts.drains}.get("a", "Held")
    decision = decide(facts, NOW)
    told = [(c.old or "Held", c.new or "Held") for c in decision.transitions if c.node == "a"]
    state = want.partition(" ")[0]
    assert told == ([] if before == state else [(before, state)])
    settled = decide(replace(facts, drains=decision.drains, evictions={}), NOW)
    assert settled.drains == decision.drains
    assert settled.transitions == ()


def test_eviction_starts_a_clock_of_its_own_after_exposure() -> None:
    facts = some_facts(
        drains=(a_drain(EXPOSED, 700),), nodes=drained(700), evictions=an_eviction(age=1)
    )
    (drain,) = decide(facts, NOW).drains
    assert drain.deadline == ago(1) + LIMITS.max_hold


def test_request_again_keeps_the_clock() -> None:
    release = a_release(released=61)
    (drain,) = decide(some_facts(drains=(release,), nodes=drained()), NOW).drains
    assert (drain.requested_at, drain.deadline) == (NOW, release.deadline)


def test_shorter_max_hold_brings_the_deadline_forward_and_a_longer_one_does_not() -> None:
    start = a_drain(SAVING)
    for max_hold, want in ((60, ago(20 - 60)), (3600, start.deadline)):
        limits = replace(LIMITS, max_hold=timedelta(seconds=max_hold))
        (drain,) = decide(some_facts(drains=(start,), limits=limits), NOW).drains
        assert drain.deadline == want


def changes_of(facts: RunFacts) -> list[tuple[str, bool]]:
    return [(change.pod, change.hold) for change in decide(facts, NOW).labels]


LABELS: list[Any] = [
    pytest.param({}, [], id="held-and-labelled"),
    pytest.param({"drains": (a_release(),), "nodes": drained()}, [("p0", False)], id="released"),
    pytest.param({"nodes": drained(700)}, [("p0", False)], id="exposed"),
    pytest.param({"is_conflicted": True}, [("p0", False), ("p1", False)], id="another-pdb"),
    pytest.param({"mode": DrainMode.OFF}, [("p0", False), ("p1", False)], id="off"),
    pytest.param(
        {"pods": (a_pod("p0", has_hold=False), a_pod("p1", "b"))}, [("p0", True)], id="unlabelled"
    ),
    pytest.param({"pods": (a_pod(has_hold=False, is_over=True),)}, [], id="finished"),
    pytest.param({"pods": (a_pod(has_hold=False, is_terminating=True),)}, [], id="leaving"),
    pytest.param(
        {"drains": (a_release(released=180),), "pods": (a_pod(has_hold=False),)},
        [],
        id="held-again-only-once-status-says-so",
    ),
]


@pytest.mark.parametrize(("changes", "want"), LABELS)
def test_hold_labels_follow_the_states(changes: Any, want: Any) -> None:
    assert changes_of(some_facts(**changes)) == want


def test_label_change_names_the_very_pod() -> None:
    facts = some_facts(is_conflicted=True, pods=(a_pod("p0"),))
    assert decide(facts, NOW).labels == (LabelChange(pod="p0", uid="uid-p0", hold=False),)


def test_gang_only_pods_of_the_drained_node_are_let_go() -> None:
    facts = some_facts(
        drains=(a_drain(FLUSHING),),
        report=SEALED,
        durable=DURABLE_NOW,
    )
    assert changes_of(facts) == [("p0", False)]


def test_second_node_is_fresh_once_the_first_ones_save_is_durable() -> None:
    facts = some_facts(
        drains=(a_drain(FLUSHING, 40), a_drain(REQUESTED, 12, "b")),
        report=reported("Sealed", asked=40),
        durable=DURABLE_NOW,
    )
    decision = decide(facts, NOW)
    assert state_of(decision, "a") == "Released Durable"
    assert state_of(decision, "b") == "Released Fresh"


def test_second_node_is_not_silent_while_the_first_ones_save_is_copied() -> None:
    facts = some_facts(
        drains=(a_drain(FLUSHING, 200), a_drain(REQUESTED, 100, "b")),
        report=reported("Sealed", asked=200),
    )
    assert state_of(decide(facts, NOW), "b") == "Requested Evicted"


def test_drains_beyond_the_schemas_bound_drop_the_oldest_release_first() -> None:
    names = [f"n{i:02}" for i in range(40)]
    drains = [a_release(released=i, node=names[i]) for i in range(20)]
    drains += [a_drain(SAVING, node=name) for name in names[20:]]
    facts = some_facts(
        drains=tuple(drains),
        pods=tuple(a_pod(f"p{i}", names[i]) for i in range(40)),
        nodes={name: a_node(name, 30) for name in names},
    )
    kept = [drain.node for drain in decide(facts, NOW).drains]
    assert kept == names[:12] + names[20:]
