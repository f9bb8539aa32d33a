from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from tidegate_contract.errors import Reject
from tidegate_contract.keys import DrainState
from tidegate_operator.api_run import RestoreFrom, RunDrainMode, parse_run
from tidegate_operator.api_run_status import DurableStatus, NodeDrain, RunStatus
from tidegate_operator.api_types import Condition, ConditionStatus

SAMPLE = """
apiVersion: tidegate.io/v1alpha1
kind: CheckpointRun
metadata: {name: llama-70b, namespace: team-a}
spec: {policyName: default, pinnedSteps: [100000]}
"""
NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def a_run(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None) -> Any:
    raw: dict[str, Any] = {"metadata": {"name": "moe", "namespace": "team-a"}}
    return raw | ({"spec": spec} if spec else {}) | ({"status": status} if status else {})


def test_run_sample_of_the_documentation_is_read() -> None:
    run = parse_run(yaml.safe_load(SAMPLE))

    assert run.metadata.name == "llama-70b"
    assert run.spec.policy_name == "default"
    assert run.spec.pinned_steps == (100_000,)
    assert run.status == RunStatus()


def test_run_without_spec_inherits_the_policy() -> None:
    run = parse_run(a_run())
    assert run.spec.drain_mode is RunDrainMode.INHERIT
    assert run.spec.restore is None


def test_restore_from_a_step_is_read() -> None:
    restore = parse_run(a_run({"restore": {"from": "Step", "step": 0}})).spec.restore
    assert restore is not None
    assert (restore.from_, restore.step) == (RestoreFrom.STEP, 0)


def test_status_of_both_writers_is_read() -> None:
    status = parse_run(
        a_run(
            status={
                "runID": "6f1c",
                "lastDurable": {"step": 7, "time": "2026-11-29T12:00:00Z", "sizeBytes": 5},
                "drains": [{"node": "node-1", "nodeUID": "u", "state": "Flushing"}],
                "saves": {"stallP95Ms": 12},
                "conditions": [],
            }
        )
    ).status

    assert status.run_id == "6f1c"
    assert status.last_durable == DurableStatus(step=7, time=NOON, size_bytes=5)
    assert status.drains == (NodeDrain(node="node-1", node_uid="u", state=DrainState.FLUSHING),)
    assert status.saves is not None
    assert status.saves.stall_p95_ms == 12


@pytest.mark.parametrize(
    ("spec", "status", "want"),
    [
        pytest.param(
            {"restore": {"from": "Step"}},
            None,
            "spec.restore: step must be set exactly when from is Step",
            id="step-missing",
        ),
        pytest.param(
            {"restore": {"step": 4}},
            None,
            "spec.restore: step must be set exactly when from is Step",
            id="step-without-from",
        ),
        pytest.param(
            {"pinnedSteps": list(range(17))},
            None,
            "spec.pinnedSteps must have at most 16 items",
            id="too-many-pinned",
        ),
        pytest.param(
            {"pinnedSteps": [1, -1]},
            None,
            "spec.pinnedSteps[1] must be greater than or equal to 0, not -1",
            id="pinned-below-zero",
        ),
        pytest.param(
            {"drainMode": "Enforce"},
            None,
            "spec.drainMode must be 'Inherit', 'Observe' or 'Off', not 'Enforce'",
            id="drain-mode-unknown",
        ),
        pytest.param(
            None,
            {"drains": [{"node": "node-1"}]},
            "status.drains[0].state is required",
            id="drain-without-state",
        ),
    ],
)
def test_bad_run_is_refused_in_one_sentence_naming_the_field(
    spec: dict[str, Any] | None, status: dict[str, Any] | None, want: str
) -> None:
    with pytest.raises(Reject) as refusal:
        parse_run(a_run(spec, status))
    assert str(refusal.value) == f"CheckpointRun team-a/moe: {want}"


def test_report_writes_only_the_fields_of_its_manager() -> None:
    report = RunStatus(
        run_id="6f1c", last_durable=DurableStatus(step=7, time=NOON), last_report_time=NOON
    )
    assert report.to_wire() == {
        "runID": "6f1c",
        "lastDurable": {"step": 7, "time": "2026-11-29T12:00:00Z"},
        "lastReportTime": "2026-11-29T12:00:00Z",
    }


def test_empty_list_that_was_set_is_written() -> None:
    assert RunStatus(drains=()).to_wire() == {"drains": []}


def test_condition_is_written_under_its_wire_names() -> None:
    condition = Condition(
        type="Durable",
        status=ConditionStatus.TRUE,
        reason="Fresh",
        message="Step 7 is durable.",
        last_transition_time=NOON,
    )
    assert condition.to_wire() == {
        "type": "Durable",
        "status": "True",
        "reason": "Fresh",
        "message": "Step 7 is durable.",
        "lastTransitionTime": "2026-11-29T12:00:00Z",
    }
