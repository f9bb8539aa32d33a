from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_operator.api_run_status import NodeDrain, RunPhase
from tidegate_operator.api_spec import DrainMode
from tidegate_operator.controller.decide import (
    NEVER,
    build_budget_facts,
    decide_creation,
    decide_last_durable,
    decide_phase,
    decide_policy,
    decide_run_mode,
    decide_run_status,
    describe_drains,
)
from tidegate_operator.controller.facts import RunFacts, RunNote
from tidegate_operator.controller.pdb import (
    Budget,
    BudgetAction,
    BudgetDecision,
    BudgetFacts,
    BudgetReason,
)
from tidegate_operator.kube.kinds import Key
from tidegate_operator.settings import Settings

KEY = Key("team-a", "llama")
Build = Callable[..., Any]
HOLDING = BudgetDecision(action=BudgetAction.KEEP, reason=BudgetReason.HOLDING, message="m")
SILENT = timedelta(seconds=180)


def a_drain(state: str, node: str = "node-1", reason: str = "Durable") -> NodeDrain:
    return NodeDrain.model_validate({"node": node, "state": state, "reason": reason})


def test_creation_is_decided_by_the_first_live_injected_pod(a_pod: Build, a_run: Build) -> None:
    pods = (
        a_pod("a", phase="Succeeded"),
        a_pod("b", injected=False),
        a_pod("c", phase="Pending", node=""),
    )
    created = decide_creation(RunFacts(key=KEY, run=None, pods=pods))
    assert created is not None
    assert created.key.name == "c"
    assert decide_creation(RunFacts(key=KEY, run=None, pods=pods[:2])) is None
    assert decide_creation(RunFacts(key=KEY, run=a_run(), pods=pods)) is None


def test_policy_of_a_run_is_the_spec_before_the_pods(a_pod: Build, a_run: Build) -> None:
    pods = (a_pod(),)
    named = a_run(spec={"policyName": "other"})
    assert decide_policy(RunFacts(key=KEY, run=named, pods=pods)) == ("team-a", "other")
    assert decide_policy(RunFacts(key=KEY, run=a_run(), pods=pods)) == ("team-a", "default")
    assert decide_policy(RunFacts(key=KEY, run=a_run())) is None


@pytest.mark.parametrize(
    ("drain", "run_mode", "want"),
    [
        ({}, "Inherit", DrainMode.ENFORCE),
        ({"mode": "Observe"}, "Inherit", DrainMode.OBSERVE),
        ({}, "Off", DrainMode.OFF),
    ],
    ids=["enforce", "policy observes", "run is off"],
)
def test_mode_of_a_run_is_the_mildest(
    a_facts: Build, settings: Settings, drain: Any, run_mode: str, want: DrainMode
) -> None:
    assert decide_run_mode(a_facts(drain, {"drainMode": run_mode}), settings) is want


def test_mode_of_a_run_without_policy_is_off(a_facts: Build, settings: Settings) -> None:
    assert decide_run_mode(a_facts(None, {}), settings) is DrainMode.OFF


@pytest.fixture
def a_facts(a_run: Build, a_policy: Build) -> Build:
    """Facts of a run without pods, by its policy's drain fields (None: no policy) and its spec."""

    def build(drain: dict[str, Any] | None, spec: dict[str, Any]) -> RunFacts:
        policy = None if drain is None else a_policy(drain=drain)
        return RunFacts(key=KEY, run=a_run(spec=spec), policy=policy)

    return build


@pytest.fixture
def facts_of(a_pod: Build, a_run: Build, a_policy: Build) -> Build:
    """Facts of a run with one pod and a policy; keywords are fields of the run's status."""

    def build(pod: dict[str, Any], **status: Any) -> RunFacts:
        run = a_run(**status)
        return RunFacts(key=KEY, run=run, pods=(a_pod(**pod),), policy=a_policy())

    return build


NO_HOLD = {keys.HOLD_LABEL: None}


@pytest.mark.parametrize(
    ("pod", "drains", "want"),
    [
        pytest.param({}, [], 1, id="held and bound"),
        pytest.param({"phase": "Pending"}, [], 1, id="bound and not Ready counts at once"),
        pytest.param({"phase": "Pending", "node": ""}, [], 0, id="not bound"),
        pytest.param({"phase": "Failed"}, [], 0, id="terminal"),
        pytest.param({"injected": False}, [], 0, id="not injected"),
        pytest.param({}, ["Flushing"], 1, id="draining and held"),
        pytest.param({}, ["Released"], 1, id="released, label still there"),
        pytest.param({"labels": NO_HOLD}, ["Released"], 0, id="released"),
        pytest.param({"labels": NO_HOLD}, ["Exposed"], 0, id="exposed"),
        pytest.param({"labels": NO_HOLD}, [], 1, id="to be held again: counted before the label"),
        pytest.param({"labels": NO_HOLD}, ["Requested"], 1, id="released once, requested again"),
    ],
)
def test_budget_counts_pod(
    facts_of: Build, settings: Settings, pod: Any, drains: Any, want: Any
) -> None:
    entries = [{"node": "node-1", "state": state} for state in drains]
    got = build_budget_facts(
        facts_of(pod, drains=entries), settings, excess_since=None, deleted_at=None
    )
    assert (got.held, got.is_draining) == (want, bool(drains))


def test_budget_counts_no_unlabelled_pod_when_nothing_is_enforced(
    a_pod: Build, a_run: Build, a_policy: Build, settings: Settings
) -> None:
    pods = (a_pod("a"), a_pod("b", labels=NO_HOLD))
    for policy in (a_policy(drain={"mode": "Observe"}), None):
        facts = RunFacts(key=KEY, run=a_run(), pods=pods, policy=policy)
        got = build_budget_facts(facts, settings, excess_since=None, deleted_at=None)
        assert got.held == 1


@pytest.mark.parametrize(
    ("selector", "want"),
    [
        (None, ()),
        ({}, ("other",)),
        ({"matchLabels": {keys.RUN_LABEL: "llama"}}, ("other",)),
        ({"matchLabels": {keys.RUN_LABEL: "moe"}}, ()),
        ({"matchExpressions": [{"key": keys.POLICY_LABEL, "operator": "Exists"}]}, ("other",)),
    ],
    ids=["nothing", "everything", "this run", "another run", "by expression"],
)
def test_budget_rival_is_another_one_that_selects_a_live_pod(
    a_pod: Build, a_run: Build, settings: Settings, selector: Any, want: Any
) -> None:
    own = Budget(key=Key("team-a", "tidegate-llama"), uid="1", run="llama", selector={})
    other = Budget(key=Key("team-a", "other"), uid="2", selector=selector)
    facts = RunFacts(key=KEY, run=a_run(), pods=(a_pod(),), budgets=(own, other))
    got: BudgetFacts = build_budget_facts(facts, settings, excess_since=None, deleted_at=None)
    assert (got.current, got.rivals) == (own, want)


def test_budget_deletion_noted_by_the_controller_before_is_obeyed(
    a_pod: Build, a_run: Build, settings: Settings
) -> None:
    noted = {
        "type": "Held",
        "status": "False",
        "reason": "PDBDeleted",
        "message": "m",
        "lastTransitionTime": "2026-11-29T11:50:00Z",
    }
    facts = RunFacts(key=KEY, run=a_run(conditions=[noted]), pods=(a_pod(),))
    got = build_budget_facts(facts, settings, excess_since=None, deleted_at=None)
    assert got.deleted_at == datetime(2026, 11, 29, 11, 50, tzinfo=UTC)


AT_11_59 = "2026-11-29T11:59:00Z"
REPORTED = {"lastReportTime": AT_11_59}
TRAINED = {**REPORTED, "progress": {"step": 7, "tokens": 9, "time": AT_11_59}}
OLD = "2026-11-29T10:00:00Z"


@pytest.mark.parametrize(
    ("status", "pods", "want"),
    [
        pytest.param({}, [], RunPhase.PENDING, id="made by a user"),
        pytest.param({}, [{"phase": "Pending"}], RunPhase.PENDING, id="pods pending"),
        pytest.param({}, [{"started": AT_11_59}], RunPhase.RESTORING, id="just started"),
        pytest.param(REPORTED, [{}], RunPhase.RESTORING, id="reports without progress"),
        pytest.param(TRAINED, [{}], RunPhase.TRAINING, id="training"),
        pytest.param(
            {**REPORTED, "progress": {"step": 7, "time": OLD}},
            [{}],
            RunPhase.RESTORING,
            id="progress is from before the restart",
        ),
        pytest.param({}, [{}], RunPhase.SILENT, id="never reported since an hour"),
        pytest.param(
            {**TRAINED, "lastReportTime": "2026-11-29T11:57:00Z"},
            [{}],
            RunPhase.SILENT,
            id="silent",
        ),
        pytest.param(TRAINED, [], RunPhase.IDLE, id="no pods"),
        pytest.param(TRAINED, [{"phase": "Failed"}], RunPhase.IDLE, id="pods failed"),
        pytest.param(TRAINED, [{"phase": "Succeeded"}], RunPhase.FINISHED, id="pods succeeded"),
        pytest.param(TRAINED, [{"phase": "Succeeded"}, {}], RunPhase.TRAINING, id="some succeeded"),
        pytest.param({**TRAINED, "phase": "Finished"}, [], RunPhase.FINISHED, id="stays finished"),
        pytest.param(
            {**TRAINED, "phase": "Finished"}, [{}], RunPhase.TRAINING, id="the name is used again"
        ),
    ],
)
def test_phase_of_facts(
    now: datetime, a_run: Build, a_pod: Build, status: Any, pods: Any, want: RunPhase
) -> None:
    found = tuple(a_pod(f"pod-{index}", **over) for index, over in enumerate(pods))
    assert decide_phase(RunFacts(key=KEY, run=a_run(**status), pods=found), SILENT, now) is want


@pytest.mark.parametrize(
    ("drains", "held", "mode", "want"),
    [
        ([], 0, "Enforce", None),
        ([], 2, "Enforce", "Held"),
        ([], 0, "Off", "Off"),
        ([], 0, "Observe", "Off"),
        ([a_drain("Flushing")], 2, "Enforce", "node-1 Flushing"),
        ([a_drain("Saving"), a_drain("Flushing", "b")], 2, "Enforce", "2 nodes Saving"),
        ([a_drain("Released"), a_drain("Saving", "b")], 2, "Enforce", "b Saving"),
        ([a_drain("Released")], 2, "Enforce", "Held"),
        ([a_drain("Released")], 0, "Enforce", "node-1 Released"),
        ([a_drain("Requested", "n" * 253)], 1, "Enforce", "n" * 54 + " Requested"),
    ],
)
def test_drain_column_of_drains(drains: Any, held: int, mode: str, want: str | None) -> None:
    got = describe_drains(tuple(drains), held, DrainMode(mode))
    assert got == want
    assert got is None or len(got) <= 64


def test_status_of_a_training_run_names_everything_the_controller_owns(
    now: datetime, a_run: Build, a_pod: Build, a_policy: Build, settings: Settings
) -> None:
    pods = (a_pod("a"), a_pod("b", phase="Pending", node="", started=None, labels=NO_HOLD))
    facts = RunFacts(key=KEY, run=a_run(**TRAINED), pods=pods, policy=a_policy())
    decision = decide_run_status(facts, HOLDING, settings, now)
    wire = decision.status.to_wire()
    conditions = wire.pop("conditions")
    assert wire == {
        "observedGeneration": 2,
        "policyGeneration": 3,
        "tiers": {"local": "nvme", "remote": "tier/pfs", "path": "team-a/llama"},
        "phase": "Training",
        "drain": "Held",
        "pods": {"running": 1, "injected": 2, "held": 1},
    }
    assert [(one["type"], one["reason"]) for one in conditions] == [
        ("Ready", "OnSchedule"),
        ("Durable", "NeverSaved"),
        ("Held", "Held"),
    ]
    assert {one["lastTransitionTime"] for one in conditions} == {"2026-11-29T12:00:00Z"}
    # 11:59 is the newest report, and three contact timeouts of a minute are the limit.
    assert decision.recheck_after == timedelta(minutes=2)


def test_status_keeps_pinned_tiers_when_the_policy_changes(
    now: datetime, a_run: Build, a_pod: Build, a_policy: Build, settings: Settings
) -> None:
    pinned = {"local": "old", "remote": "claim/old", "path": "x/team-a/llama"}
    facts = RunFacts(key=KEY, run=a_run(tiers=pinned), pods=(a_pod(),), policy=a_policy())
    assert decide_run_status(facts, HOLDING, settings, now).status.to_wire()["tiers"] == pinned


def test_status_of_an_unknown_tier_pins_nothing(
    now: datetime, a_run: Build, a_pod: Build, a_policy: Build, settings: Settings
) -> None:
    policy = a_policy(local={"type": "Tier", "tier": "gone"})
    facts = RunFacts(key=KEY, run=a_run(), pods=(a_pod(),), policy=policy)
    assert "tiers" not in decide_run_status(facts, HOLDING, settings, now).status.to_wire()


def test_status_decided_again_from_itself_is_the_same(
    now: datetime, a_run: Build, a_pod: Build, a_policy: Build, settings: Settings
) -> None:
    facts = RunFacts(key=KEY, run=a_run(**TRAINED), pods=(a_pod(),), policy=a_policy())
    first = decide_run_status(facts, HOLDING, settings, now).status.to_wire()
    again = RunFacts(key=KEY, run=a_run(**TRAINED, **first), pods=(a_pod(),), policy=a_policy())
    later = now + timedelta(seconds=30)
    assert decide_run_status(again, HOLDING, settings, later).status.to_wire() == first


def test_last_durable_of_a_node_is_the_oldest_of_its_runs(
    ago: Callable[[float], datetime],
) -> None:
    policy = Key("team-a", "default")
    young = RunNote(policy=policy, durable_time=ago(10))
    old = RunNote(policy=policy, durable_time=ago(90))
    assert decide_last_durable([]) is None
    assert decide_last_durable([young, old]) == "2026-11-29T11:58:30Z"
    assert decide_last_durable([young, RunNote(policy=policy)]) == NEVER
